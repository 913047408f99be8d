// Implements lse_merge_rows of kernels.h. Compiled only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_LSE_MERGE_BODY_H_
#define WEFT_KERNELS_CPU_LSE_MERGE_BODY_H_

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

void LseMergeRows(const float* part, const float* part_lse, int64_t num_rows,
                  int64_t head_features, float* out, float* lse) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const float ours = lse[row];
    const float theirs = part_lse[row];
    // Skips a row that has no keys in `part`.
    if (theirs == -__builtin_inff()) continue;
    if (ours == -__builtin_inff()) {  // `out` has no keys, and may hold NaN.
      for (int64_t c = row * head_features; c < (row + 1) * head_features;
           ++c) {
        out[c] = part[c];
      }
      lse[row] = theirs;
      continue;
    }
    const float high = ours > theirs ? ours : theirs;
    // Divides by the sum instead of computing e^(lse - l) with the new
    // log-sum-exp l, because a large l has a large rounding error.
    const float our_share = __builtin_expf(ours - high);
    const float their_share = __builtin_expf(theirs - high);
    const float sum = our_share + their_share;
    const float our_weight = our_share / sum;
    const float their_weight = their_share / sum;
    float* out_C = out + row * head_features;
    const float* part_C = part + row * head_features;
    int64_t c = 0;
    for (; c + kWidth <= head_features; c += kWidth) {
      Store(out_C + c,
            Load(out_C + c) * our_weight + Load(part_C + c) * their_weight);
    }
    for (; c < head_features; ++c) {
      out_C[c] = out_C[c] * our_weight + part_C[c] * their_weight;
    }
    lse[row] = high + __builtin_logf(sum);
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_LSE_MERGE_BODY_H_
