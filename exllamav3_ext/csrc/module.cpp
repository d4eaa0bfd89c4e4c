// The Python module `_C`: empty, because the operators register themselves when the file is loaded.
// Also `build_info`, the one operator without tensor arguments.

#include <Python.h>

#include <string>
#include <utility>

#include "common.h"
#include "cpu/dispatch.h"

namespace {

std::string build_info() {
    const std::pair<const char*, const char*> items[] = {
        {"kind", EXL3_BUILD_KIND},
        {"archs", EXL3_BUILD_ARCHS},
        {"isa", exl3::isa_name(exl3::active_isa())},
        {"compiler", __VERSION__},
        {"torch_target", "2.10"},
        {"source_hash", EXL3_BUILD_SOURCE_HASH},
    };
    std::string json = "{";
    for (const auto& [key, value] : items) {
        json.append(json.size() > 1 ? ", \"" : "\"").append(key);
        json.append("\": \"").append(value).append("\"");
    }
    return json.append("}");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(exllamav3, CompositeExplicitAutograd, m) {
    m.impl("build_info", TORCH_BOX(&build_info));
}

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C(void) {
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr,
                                     nullptr, nullptr, nullptr, nullptr};
    return PyModule_Create(&definition);
}
