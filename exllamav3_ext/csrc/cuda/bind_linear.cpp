// Operators `linear` and `linear_group` on a CUDA device: checks, outputs, workspace, one launch.

#include <vector>

#include "cuda/bind.h"
#include "cuda/counters.h"

namespace exl3 {
namespace {

// One launch over members that share x. Tensors made on the way live until it has been queued.
class Launch {
  public:
    Launch(const Tensor& x, ScalarType out_dtype)
        : scope_(x), x_(for_vectors(x)), out_dtype_(out_dtype) {
        STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) > 0,
                        "linear: x must be (..., k), k > 0");
        const int64_t k = x.size(x.dim() - 1);
        params_.x = x_.const_data_ptr();
        params_.x_type = float_type(x.scalar_type(), "x");
        params_.out_type = float_type(out_dtype, "out_dtype");
        params_.rows = checked_int(x_.numel() / k, "rows of x");
        params_.k_blocks = checked_int(k / kBlock, "blocks of k");
    }

    Tensor add(const Tensor& trellis, const Tensor& suh, const Tensor& svh,
               const std::optional<Tensor>& bias, int64_t codebook) {
        STD_TORCH_CHECK(params_.members < kMaxMembers, "linear_group: at most ", kMaxMembers,
                        " members");
        check_same_device(trellis, x_, "trellis");
        const CudaWeight weight(trellis, codebook);
        weight.check_blocks("linear");
        STD_TORCH_CHECK(weight.k == x_.size(x_.dim() - 1), "linear: x has ", x_.size(x_.dim() - 1),
                        " input channels, the trellis ", weight.k);
        LinearMember& m = params_.member[params_.members++];
        m.trellis = weight.data;
        m.row_bytes = weight.row_bytes;
        m.suh = scale(suh, weight.k, "suh");
        m.svh = scale(svh, weight.n, "svh");
        if (bias) {
            m.bias_type = float_type(bias->scalar_type(), "bias");
            m.bias = vector(*bias, weight.n, "bias");
        }
        m.column_blocks = checked_int(weight.n / kBlock, "blocks of n");
        m.half_bits = weight.half_bits;
        m.codebook = int(codebook);
        std::vector<int64_t> shape(x_.sizes().begin(), x_.sizes().end());
        shape.back() = weight.n;
        Tensor out = empty(shape, out_dtype_, x_);
        m.out = out.mutable_data_ptr();
        keep_.push_back(weight.owner);
        return out;
    }

    void run() {
        if (params_.rows == 0) return;
        const LinearPlan plan = plan_linear(params_, has_clusters(scope_.device));
        STD_TORCH_CHECK(plan.counters <= kCounters, "linear: ", plan.counters,
                        " column blocks in one launch, at most ", kCounters);
        if (plan.counters > 0) {
            EXL3_CUDA_CHECK(arrival_counters(scope_.device, scope_.stream, &params_.counters));
            keep_.push_back(empty({plan.partial_floats}, ScalarType::Float, x_));
            params_.partials = static_cast<float*>(keep_.back().mutable_data_ptr());
        }
        EXL3_CUDA_CHECK(launch_linear(params_, plan, scope_.stream));
    }

  private:
    static int checked_int(int64_t value, const char* what) {
        STD_TORCH_CHECK(value >= 0 && value < (int64_t{1} << 30), "linear: too many ", what, ": ",
                        value);
        return int(value);
    }
    const void* vector(const Tensor& t, int64_t size, const char* name) {
        check_same_device(t, x_, name);
        check_dim(t, 1, name);
        check_size(t, 0, size, name);
        keep_.push_back(for_vectors(t));
        return keep_.back().const_data_ptr();
    }
    const void* scale(const Tensor& t, int64_t size, const char* name) {
        check_dtype(t, ScalarType::Half, name);
        return vector(t, size, name);
    }

    const CudaScope scope_;
    const Tensor x_;
    const ScalarType out_dtype_;
    LinearParams params_{};
    std::vector<Tensor> keep_;
};

Tensor linear(const Tensor& x, const Tensor& trellis, const Tensor& suh, const Tensor& svh,
              const std::optional<Tensor>& bias, int64_t codebook, ScalarType out_dtype) {
    Launch launch(x, out_dtype);
    Tensor out = launch.add(trellis, suh, svh, bias, codebook);
    launch.run();
    return out;
}

std::vector<Tensor> linear_group(const Tensor& x, const std::vector<Tensor>& trellis,
                                 const std::vector<Tensor>& suh, const std::vector<Tensor>& svh,
                                 const std::vector<int64_t>& codebooks, ScalarType out_dtype) {
    STD_TORCH_CHECK(!trellis.empty() && trellis.size() == suh.size() && suh.size() == svh.size() &&
                        svh.size() == codebooks.size(),
                    "linear_group: the lists must have the same length, at least 1");
    Launch launch(x, out_dtype);
    std::vector<Tensor> outs;
    for (size_t i = 0; i < trellis.size(); ++i)
        outs.push_back(launch.add(trellis[i], suh[i], svh[i], std::nullopt, codebooks[i]));
    launch.run();
    return outs;
}

}  // namespace
}  // namespace exl3

STABLE_TORCH_LIBRARY_IMPL(exllamav3, CUDA, m) {
    m.impl("linear", TORCH_BOX(&exl3::linear));
    m.impl("linear_group", TORCH_BOX(&exl3::linear_group));
}
