// The row product of a single row of x, and how the elements of any row product
// are written. Compiled only in table_*.cc.
#ifndef WEFT_KERNELS_CPU_ONE_ROW_PRODUCT_H_
#define WEFT_KERNELS_CPU_ONE_ROW_PRODUCT_H_

#include "kernels/cpu/row_product.h"
#include "kernels/cpu/row_weights.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// Returns the number of inputs that fill whole vectors. AddRest adds the
// others.
WEFT_INLINE int64_t WholeInputs(const RowProduct& p) {
  return p.num_inputs / kWidth * kWidth;
}

// Returns `sum` plus the products of the inputs after the last whole vector,
// added one by one. Uses explicit fused operations, because otherwise the
// surrounding code would decide whether the compiler fuses.
template <typename Weight>
WEFT_INLINE float AddRest(const RowProduct& p, const float* x,
                          const Weight* weight, float sum) {
  for (int64_t i = WholeInputs(p); i < p.num_inputs; ++i) {
    sum = __builtin_fmaf(x[i], WeightAt(p, weight, i), sum);
  }
  return sum;
}

// Writes an element of y, given the sum of its inputs in whole vectors.
template <typename Weight>
WEFT_INLINE void WriteOutput(const RowProduct& p, const Weight* weight,
                             int64_t row, int64_t output, float sum) {
  sum = AddRest(p, p.x_BI + row * p.x_stride, weight + output * p.weight_stride,
                sum);
  if (p.bias_O != nullptr) sum += p.bias_O[output];
  p.y_BO[row * p.y_stride + output] = sum;
}

// Writes kRowOutputs elements of a row of y, given their sums.
template <typename Weight>
WEFT_INLINE void WriteOutputs(const RowProduct& p, const Weight* weight,
                              int64_t row, int64_t output, const float* sums) {
  if (WholeInputs(p) < p.num_inputs) {
    for (int64_t o = 0; o < kRowOutputs; ++o) {
      WriteOutput(p, weight, row, output + o, sums[o]);
    }
    return;
  }
  Quad sum = LoadQuad(sums);
  if (p.bias_O != nullptr) sum += LoadQuad(p.bias_O + output);
  StoreQuad(p.y_BO + row * p.y_stride + output, sum);
}

// Returns the sum of the inputs in whole vectors, for one row of x and the
// weight's row `output`.
template <typename Weight>
WEFT_INLINE float SumRow(const RowProduct& p, const float* x,
                         const Weight* weight, int64_t output) {
  const int64_t whole = WholeInputs(p);
  float total = 0;
  for (int64_t begin = 0; begin < whole; begin += kRowPart) {
    const int64_t inputs = Smaller(kRowPart, whole - begin);
    const Weight* from = weight + output * p.weight_stride + begin;
    Vec sum{};
    for (int64_t i = 0; i < inputs; i += kWidth) {
      __builtin_prefetch((const char*)(from + i) + kAheadBytes);
      sum = MultiplyAdd(Load(x + begin + i), LoadWeights(from + i), sum);
    }
    total = begin == 0 ? Sum(sum) : total + Sum(sum);
  }
  return total;
}

WEFT_INLINE float SumRow(const RowProduct& p, const float* x,
                         const int8_t* weight, int64_t output) {
  const int64_t whole = WholeInputs(p);
  const int8_t* row = weight + output * p.weight_stride;
  float total = 0;
  for (int64_t begin = 0; begin < whole; begin += kRowPart) {
    const int64_t end = begin + Smaller(kRowPart, whole - begin);
    Vec sum{};
    for (int64_t i = begin; i < end; i += kWidth) {
      const Vec scale = Fill(Int8Scale(row, p.num_inputs, i));
      sum = MultiplyAdd(Load(x + i), LoadWeights(row + i) * scale, sum);
    }
    total = begin == 0 ? Sum(sum) : total + Sum(sum);
  }
  return total;
}

// The number of weight rows in 8 bits that SumRows multiplies at a time. Their
// sums and scales fit in the vector registers.
inline constexpr int64_t kInt8Outputs = kWidth == 16 ? 8 : kRowOutputs;

// Computes what SumRow does for kInt8Outputs rows of a weight in 8 bits. With
// one weight row, each addition would wait for the addition before it (Zen 5,
// from the second-level cache: 29 GB/s with 1 row, 38 with 4, 47 with 8).
// Prefetches the weight rows that follow (two cores, from memory: 58 GB/s with
// 4 rows and 1 KB ahead, 74 with 8 rows and 4 KB ahead).
WEFT_INLINE void SumRows(const RowProduct& p, const float* x,
                         const int8_t* weight, float* totals) {
  constexpr int64_t kLine = Fetch::kLineBytes;
  const int64_t stride = p.weight_stride;
  const int64_t all = kInt8Outputs * stride;
  const char* next = (const char*)weight + all + kAheadBytes;
  const int64_t whole = WholeInputs(p);
  int64_t fetched = 0;
  for (int64_t o = 0; o < kInt8Outputs; ++o) totals[o] = 0;
  for (int64_t part = 0; part < whole; part += kRowPart) {
    const int64_t part_end = part + Smaller(kRowPart, whole - part);
    Vec sums[kInt8Outputs] = {};
    for (int64_t begin = part; begin < part_end; begin += kInt8Group) {
      const int64_t end = Smaller(begin + kInt8Group, part_end);
      for (int64_t line = 0; line < kInt8Outputs && fetched < all; ++line) {
        __builtin_prefetch(next + fetched);
        fetched += kLine;
      }
      Vec scales[kInt8Outputs];
      for (int64_t o = 0; o < kInt8Outputs; ++o) {
        scales[o] = Fill(Int8Scale(weight + o * stride, p.num_inputs, begin));
      }
      for (int64_t i = begin; i < end; i += kWidth) {
        const Vec x_vec = Load(x + i);
        for (int64_t o = 0; o < kInt8Outputs; ++o) {
          const Vec w = LoadWeights(weight + o * stride + i) * scales[o];
          sums[o] = MultiplyAdd(x_vec, w, sums[o]);
        }
      }
    }
    for (int64_t o = 0; o < kInt8Outputs; ++o) {
      totals[o] = part == 0 ? Sum(sums[o]) : totals[o] + Sum(sums[o]);
    }
  }
}

// Computes outputs of a single row of x. Goes over one weight row after
// another, which is faster than a tile, which reads several in parallel.
template <typename Weight>
void RunOneRow(const RowProduct& p, const Weight* weight) {
  for (int64_t o = p.begin; o < p.end; ++o) {
    WriteOutput(p, weight, 0, o, SumRow(p, p.x_BI, weight, o));
  }
}

void RunOneRow(const RowProduct& p, const int8_t* weight) {
  int64_t o = p.begin;
  for (; o + kInt8Outputs <= p.end; o += kInt8Outputs) {
    float totals[kInt8Outputs];
    SumRows(p, p.x_BI, weight + o * p.weight_stride, totals);
    for (int64_t i = 0; i < kInt8Outputs; ++i) {
      WriteOutput(p, weight, 0, o + i, totals[i]);
    }
  }
  for (; o < p.end; ++o) {
    WriteOutput(p, weight, 0, o, SumRow(p, p.x_BI, weight, o));
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_ONE_ROW_PRODUCT_H_
