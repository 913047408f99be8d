// Times the kernels for weights of 8 bits. Compares widening with a copy that
// moves the same number of bytes. Compares products of few rows with a copy of
// the weight, and with cuBLAS' product with a bf16 weight.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/cpu/int8_rows.h"
#include "kernels/cuda/int8_weight.h"
#include "tests/bench/kernels_cuda/bench.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

using cpu::Int8RowStride;
using cpu::kInt8Group;

// The matrices of a layer of Llama-3.1-8B, and two whose rows have padding.
struct Matrix {
  const char* name;
  int64_t inputs;
  int64_t outputs;
};
constexpr Matrix kMatrices[] = {
    {"qkv", 4096, 6144},         {"o", 4096, 4096},
    {"gate_up", 4096, 28672},    {"down", 14336, 4096},
    {"smollm2_gate", 576, 1536}, {"llama2_down", 11008, 4096}};
constexpr int64_t kRows[] = {1, 8, 16, 64};

// Layers of one matrix each, all of the same shape. Together the layers exceed
// the cache. The memory is filled with random bf16 numbers. So the scales are
// random numbers, and each integer is one byte of a random bf16 number.
class Weights {
 public:
  explicit Weights(const Matrix& matrix)
      : matrix_(matrix),
        num_layers_(ColdLayers(bytes())),
        words_(num_layers_ * bytes() / 2) {}

  int64_t num_layers() const { return num_layers_; }
  // Returns the bytes of a layer.
  int64_t bytes() const {
    return matrix_.outputs * Int8RowStride(matrix_.inputs);
  }
  Int8Weight Layer(int64_t layer) const {
    return {.outputs = matrix_.outputs,
            .inputs = matrix_.inputs,
            .rows_OB = reinterpret_cast<const int8_t*>(words_.data()) +
                       layer * bytes(),
            .stride = Int8RowStride(matrix_.inputs)};
  }
  // Returns a row of the first layer, widened to floats.
  std::vector<float> Row(int64_t output) const {
    const int64_t row_words = Int8RowStride(matrix_.inputs) / 2;
    const std::vector<uint16_t> row =
        words_.Read(output * row_words, row_words);
    std::vector<int8_t> integers(static_cast<size_t>(matrix_.inputs));
    std::memcpy(integers.data(), row.data(), integers.size());
    std::vector<float> numbers;
    for (int64_t i = 0; i < matrix_.inputs; ++i) {
      const auto scale =
          static_cast<size_t>(matrix_.inputs / 2 + i / kInt8Group);
      numbers.push_back(static_cast<float>(integers[static_cast<size_t>(i)]) *
                        FromBf16(row[scale]));
    }
    return numbers;
  }

 private:
  const Matrix& matrix_;
  int64_t num_layers_;
  Bf16Buffer words_;
};

void BenchWidening(const Device& device, const Matrix& matrix,
                   const Weights& weights) {
  const int64_t count = matrix.outputs * matrix.inputs;
  const Bf16Buffer wide(count);
  const auto run = [&] {
    Check(WidenInt8Rows(weights.Layer(0), 0, matrix.inputs, DType::kBf16,
                        wide.data(), nullptr));
  };
  run();
  for (const int64_t row : {int64_t{0}, matrix.outputs - 1}) {
    const std::vector<float> actual =
        wide.Floats(row * matrix.inputs, matrix.inputs);
    const std::vector<float> expected = weights.Row(row);
    for (size_t i = 0; i < actual.size(); ++i) {
      CheckNear(actual[i], expected[i], kEpsilonBf16, 1, std::abs(expected[i]),
                "WidenInt8Rows");
    }
  }
  Line("WidenInt8Rows")
      .Add("matrix", matrix.name)
      .AddBytes(device, static_cast<double>(weights.bytes() + 2 * count), run)
      .Print();
}

// x [rows, inputs] and y [rows, outputs] of one matrix.
struct Rows {
  Rows(const Matrix& of, int64_t num_rows)
      : matrix(of),
        count(num_rows),
        x(count * of.inputs),
        y(count * of.outputs) {}

  void Multiply(const Int8Weight& weight, cudaStream_t stream) const {
    Check(Int8FewRows({.num_rows = count,
                       .weight = weight,
                       .x_MI = x.data(),
                       .x_stride = matrix.inputs,
                       .y_MO = y.data(),
                       .y_stride = matrix.outputs},
                      stream));
  }
  // Compares some elements of y with loops in f64.
  void CheckResult(const Weights& weights) const {
    for (const int64_t output : {int64_t{0}, int64_t{77}, matrix.outputs - 1}) {
      const std::vector<float> numbers = weights.Row(output);
      for (const int64_t row : {int64_t{0}, count - 1}) {
        const std::vector<float> in =
            x.Floats(row * matrix.inputs, matrix.inputs);
        double sum = 0, largest = 0;
        for (size_t i = 0; i < in.size(); ++i) {
          sum += static_cast<double>(in[i]) * numbers[i];
          largest = std::max(largest, std::abs(sum));
        }
        CheckNear(y.Floats(row * matrix.outputs + output, 1)[0], sum,
                  kEpsilonBf16, matrix.inputs, largest, "Int8FewRows");
      }
    }
  }

  const Matrix& matrix;
  int64_t count;
  Bf16Buffer x, y;
};

// `time` is the time of a launch in a replayed graph. `call` and
// `cublas_bf16_call` also include the fixed cost of a single call.
void BenchProduct(const Device& device, const Weights& weights,
                  const Bf16Buffer& bf16_weight, const Rows& rows) {
  rows.Multiply(weights.Layer(0), nullptr);
  rows.CheckResult(weights);
  const double time = ReplaySeconds(
      weights.num_layers(), [&](int64_t layer, cudaStream_t stream) {
        rows.Multiply(weights.Layer(layer), stream);
      });
  const Matrix& matrix = rows.matrix;
  const double copy_time =
      static_cast<double>(weights.bytes()) / device.copy_rate();
  const double call =
      device.Seconds([&] { rows.Multiply(weights.Layer(0), nullptr); });
  const double cublas = device.Seconds([&] {
    RunGemm(device, {.m = rows.count,
                     .n = matrix.outputs,
                     .k = matrix.inputs,
                     .a = {rows.x.data(), matrix.inputs},
                     .b = {bf16_weight.data(), matrix.inputs,
                           /*transposed=*/true},
                     .c = rows.y.data(),
                     .c_stride = matrix.outputs});
  });
  Line("Int8FewRows")
      .Add("matrix", matrix.name)
      .Add("rows", rows.count)
      .AddTime("time", time)
      .AddTime("copy_time", copy_time)
      .AddRatio("of_copy", copy_time / time)
      .AddTime("call", call)
      .AddTime("cublas_bf16_call", cublas)
      .Print();
}

}  // namespace

void BenchInt8(const Device& device) {
  for (const Matrix& matrix : kMatrices) {
    const Weights weights(matrix);
    BenchWidening(device, matrix, weights);
    const Bf16Buffer bf16_weight(matrix.outputs * matrix.inputs);
    for (const int64_t rows : kRows) {
      BenchProduct(device, weights, bf16_weight, Rows(matrix, rows));
    }
  }
}

}  // namespace weft::kernels::cuda::bench
