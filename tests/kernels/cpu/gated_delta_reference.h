// The gated delta rule and the gated norm as plain loops in f64, for tests.
// Legend: that of gated_delta.h.
#ifndef WEFT_TESTS_KERNELS_CPU_GATED_DELTA_REFERENCE_H_
#define WEFT_TESTS_KERNELS_CPU_GATED_DELTA_REFERENCE_H_

#include <cstdint>
#include <functional>
#include <vector>

namespace weft::kernels::cpu::reference {

// One head's rows, and the state before them.
struct DeltaHead {
  int64_t num_rows = 0;
  int64_t key_features = 0;
  int64_t value_features = 0;
  std::vector<double> q, k;     // [C, K].
  std::vector<double> v;        // [C, V].
  std::vector<double> beta, g;  // [C].
  std::vector<double> start;    // [K, V].
};

struct DeltaOutput {
  std::vector<double> out, u;  // [C, V].
  std::vector<double> stop;    // [K, V].
};

// Computes the rule row by row.
DeltaOutput RunDelta(const DeltaHead& head);

// Returns the gradients, given those of the outputs and of the end state.
DeltaHead RunDeltaBackward(const DeltaHead& head,
                           const std::vector<double>& dout,
                           const std::vector<double>& dstop);

// Returns q, k and v of one row, given its convolution [W]: silu, and the l2
// norm of the first num_heads / 2 heads, times query_scale, and of as many
// others.
std::vector<double> MixRow(const std::vector<double>& conv, int64_t num_heads,
                           int64_t key_features, double eps,
                           double query_scale);

std::vector<double> GatedNormRow(const std::vector<double>& x,
                                 const std::vector<double>& z,
                                 const std::vector<float>& weight, double eps);

// Returns the gradient of the sum of d * function(x) by central differences.
std::vector<double> Differences(
    const std::function<std::vector<double>(const std::vector<double>&)>&
        function,
    const std::vector<double>& x, const std::vector<float>& d);

}  // namespace weft::kernels::cpu::reference

#endif  // WEFT_TESTS_KERNELS_CPU_GATED_DELTA_REFERENCE_H_
