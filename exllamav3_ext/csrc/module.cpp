// The Python module `_C`: empty, because the operators register themselves when the file is loaded.
// Also `build_info`, the one operator without tensor arguments.

#include <Python.h>

#include <string>

#include "common.h"
#include "cpu/dispatch.h"

namespace {

std::string build_info() {
    auto item = [](const char* key, const std::string& value) {
        return std::string("\"") + key + "\": \"" + value + "\"";
    };
    return "{" + item("kind", EXL3_BUILD_KIND) + ", " + item("archs", EXL3_BUILD_ARCHS) + ", " +
           item("isa", exl3::isa_name(exl3::active_isa())) + ", " +
           item("compiler", __VERSION__) + ", " + item("torch_target", "2.10") + ", " +
           item("source_hash", EXL3_BUILD_SOURCE_HASH) + "}";
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
