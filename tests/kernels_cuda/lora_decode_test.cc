// Compares RunLoraResidual and RunLoraGate with loops in f64.
#include "kernels/cuda/lora_decode.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cpu/reference.h"
#include "tests/kernels_cuda/lora_decode_problem.h"

namespace weft::kernels::cuda {
namespace {

using weft::testing::kEpsilonBf16;
using weft::testing::kEpsilonF32;
using weft::testing::StoredTolerance;
using weft::testing::Tolerance;
namespace reference = weft::kernels::cpu::reference;

constexpr float kEps = 1e-5F;

class CudaLoraDecodeTest : public CudaKernelTest {};

// Returns `shift` + `count` random values, rounded as the device stores them.
std::vector<float> Shifted(int64_t shift, int64_t count, uint32_t seed) {
  return Rounded(DType::kBf16, RandomFloats(shift + count, seed));
}

// Compares `values`, the parts of x A^T, with f64 sums over the rows `x`. Each
// part is a sum over `each` features.
void CheckParts(const DecodeAdapters& adapters, const LoraParts& parts,
                const std::vector<float>& values, const std::vector<float>& x,
                int64_t each) {
  const int64_t inputs = adapters.of().inputs;
  for (int64_t row = 0; row < adapters.of().num_rows; ++row) {
    for (int64_t part = 0; part < parts.count; ++part) {
      for (int64_t rank = 0; rank < parts.stride; ++rank) {
        const float actual =
            values[(row * parts.count + part) * parts.stride + rank];
        if (rank >= adapters.RankOfA(row)) {
          ASSERT_TRUE(std::isnan(actual)) << "nothing is written here";
          continue;
        }
        ASSERT_NEAR(actual,
                    adapters.ShrunkPart(row, x.data() + row * inputs, rank,
                                        part * each, (part + 1) * each),
                    Tolerance(kEpsilonF32, each, 4))
            << "row " << row << " part " << part << " rank " << rank;
      }
    }
  }
}

// A launch of RunLoraResidual.
struct Residual {
  explicit Residual(const DecodeProblem& problem, bool has_next = true)
      : adapters(problem),
        rows(problem.num_rows),
        hidden(problem.inputs),
        shift(problem.shift),
        y_values(Shifted(shift, rows * hidden, 1)),
        x_values(Shifted(shift, rows * hidden, 2)),
        weight_values(Shifted(shift, hidden, 4)),
        y(DType::kBf16, y_values),
        x(DType::kBf16, x_values),
        weight(DType::kBf16, weight_values),
        scaled(DType::kBf16, std::vector<float>(shift + rows * hidden, 9)),
        squares(std::vector<float>(rows * LoraResidualParts(hidden), kNan)),
        next(std::vector<float>(rows * LoraResidualParts(hidden) *
                                        LoraPartStride(problem.MaxRankOfA()) +
                                    1,
                                kNan)),
        launch{.table = adapters.table(),
               .slot_of_b = 1,
               .slot_of_a = 0,
               .hidden = hidden,
               .shrunk = adapters.shrunk(),
               .y_TH = y.at(shift),
               .x_TH = x.at(shift),
               .sum_TH = y.at(shift)} {
    if (!has_next) return;
    launch.weight_H = weight.at(shift);
    launch.scaled_TH = scaled.at(shift);
    launch.squares_TP = squares.data();
    launch.next = {.data = next.data(),
                   .count = static_cast<int>(LoraResidualParts(hidden)),
                   .stride = LoraPartStride(problem.MaxRankOfA())};
  }
  void Run() const { ASSERT_EQ(RunLoraResidual(launch, nullptr), cudaSuccess); }

  // Returns the rows that the device holds.
  [[nodiscard]] std::vector<float> Rows(const DeviceArray& array) const {
    return Slice(array.Read(), shift, rows * hidden);
  }
  void CheckSum() const {
    const std::vector<float> sum = Rows(y);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < hidden; ++i) {
        const int64_t at = row * hidden + i;
        const double expected = static_cast<double>(y_values[shift + at]) +
                                x_values[shift + at] +
                                adapters.Expanded(row, 0, i);
        ASSERT_NEAR(sum[at], expected,
                    StoredTolerance(kEpsilonBf16, 128, 32, expected))
            << "row " << row << " feature " << i;
      }
    }
  }
  // Checks the results that the kernel computes from the stored sum.
  void CheckNext() const {
    const std::vector<float> sum = Rows(y), u = Rows(scaled);
    const std::vector<float> squared = squares.Read();
    const int64_t parts = LoraResidualParts(hidden);
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<double> expected(parts);
      for (int64_t i = 0; i < hidden; ++i) {
        const double x_i = sum[row * hidden + i];
        expected[i / kLoraResidualFeatures] += x_i * x_i;
        ASSERT_EQ(
            u[row * hidden + i],
            FromBf16(ToBf16(sum[row * hidden + i] * weight_values[shift + i])));
      }
      for (int64_t part = 0; part < parts; ++part) {
        ASSERT_NEAR(
            squared[row * parts + part], expected[part],
            Tolerance(kEpsilonF32, kLoraResidualFeatures, expected[part]));
      }
    }
    CheckParts(adapters, launch.next, next.Read(), u, kLoraResidualFeatures);
  }

  DecodeAdapters adapters;
  int64_t rows, hidden, shift;
  std::vector<float> y_values, x_values, weight_values;
  DeviceArray y, x, weight, scaled;
  DeviceBuffer<float> squares, next;
  LoraResidual launch;
};

void CheckResidual(const DecodeProblem& problem) {
  const Residual residual(problem);
  residual.Run();
  residual.CheckSum();
  residual.CheckNext();
  EXPECT_EQ(residual.x.Read(), residual.x_values);
}

TEST_F(CudaLoraDecodeTest, AddsToTheResidualStreamOfMixedRows) {
  CheckResidual(MixedDecode({520}, 520, 0));
}

TEST_F(CudaLoraDecodeTest, AddsToAResidualStreamThatLiesAnywhere) {
  CheckResidual(MixedDecode({101}, 101, 0));
  CheckResidual(MixedDecode({264}, 264, 3));
}

// The first problem has the sizes of Llama-3.1-8B: B of o, then A of gate and
// up. The second problem has the sizes of B of down in SmolLM2.
TEST_F(CudaLoraDecodeTest, AddsToTheResidualStreamOfServedModels) {
  CheckResidual(OneRow({4096}, 4096, 32, 64));
  CheckResidual(OneRow({576}, 576, 8, 24));
}

TEST_F(CudaLoraDecodeTest, AddsToTheResidualStreamOfManyRows) {
  CheckResidual(ManyItems({24}, 24, /*tiles=*/1));
}

// This is the launch after the last layer.
TEST_F(CudaLoraDecodeTest, AddsWithoutANormThatFollows) {
  const Residual residual(MixedDecode({520}, 520, 0), /*has_next=*/false);
  residual.Run();
  residual.CheckSum();
  EXPECT_EQ(residual.Rows(residual.scaled),
            std::vector<float>(residual.rows * residual.hidden, 9));
  EXPECT_TRUE(std::isnan(residual.squares.Read().front()));
}

// A launch of RunLoraGate.
struct Gate {
  explicit Gate(const DecodeProblem& problem,
                GateActivation activation = GateActivation::kSilu,
                bool has_bias = true)
      : adapters(problem),
        rows(problem.num_rows),
        features(problem.inputs),
        shift(problem.shift),
        in_values(Shifted(shift, rows * 2 * features, 1)),
        bias_values(has_bias ? Shifted(shift, 2 * features, 2)
                             : std::vector<float>(shift + 2 * features)),
        squares_values(rows * LoraResidualParts(kHidden)),
        in(DType::kBf16, in_values),
        bias(DType::kBf16, bias_values),
        out(DType::kBf16, std::vector<float>(shift + rows * features, 9)),
        down(std::vector<float>(rows * LoraGateParts(features) *
                                        LoraPartStride(problem.MaxRankOfA()) +
                                    1,
                                kNan)) {
    for (size_t i = 0; i < squares_values.size(); ++i) {
      squares_values[i] = 100 + 50 * static_cast<float>(i % 7);
    }
    squares = std::make_unique<DeviceBuffer<float>>(squares_values);
    launch = {
        .table = adapters.table(),
        .slots_of_b = {1, 2},
        .slot_of_a = 0,
        .features = features,
        .shrunk = adapters.shrunk(),
        .norm = {.squares_TP = squares->data(), .hidden = kHidden, .eps = kEps},
        .activation = activation,
        .gate_up_T2F = in.at(shift),
        .bias_2F = has_bias ? bias.at(shift) : nullptr,
        .out_TF = out.at(shift),
        .down = {.data = down.data(),
                 .count = static_cast<int>(LoraGateParts(features)),
                 .stride = LoraPartStride(problem.MaxRankOfA())}};
  }
  void Run() const { ASSERT_EQ(RunLoraGate(launch, nullptr), cudaSuccess); }

  [[nodiscard]] double FactorOf(int64_t row) const {
    const int64_t parts = LoraResidualParts(kHidden);
    double sum = 0;
    for (int64_t i = 0; i < parts; ++i) sum += squares_values[row * parts + i];
    return 1 / std::sqrt(sum / static_cast<double>(kHidden) + kEps);
  }
  // Returns a row's gate (0) or up (1) with LoRA, norm factor and bias.
  [[nodiscard]] std::vector<float> Side(int64_t row, int64_t side) const {
    std::vector<float> values;
    for (int64_t i = 0; i < features; ++i) {
      const int64_t at = shift + (row * 2 + side) * features + i;
      values.push_back(static_cast<float>(
          FactorOf(row) * (in_values[at] + adapters.Expanded(row, side, i)) +
          bias_values[shift + side * features + i]));
    }
    return values;
  }
  void Check() const {
    const std::vector<float> actual = Slice(out.Read(), shift, rows * features);
    for (int64_t row = 0; row < rows; ++row) {
      const std::vector<float> gate = Side(row, 0), up = Side(row, 1);
      const std::vector<double> expected =
          launch.activation == GateActivation::kSilu
              ? reference::SwiGluRow(gate, up)
          : launch.activation == GateActivation::kGeluTanh
              ? reference::GeGluRow(gate, up)
              : reference::ClampedSwiGluRow(gate, up);
      for (int64_t i = 0; i < features; ++i) {
        ASSERT_NEAR(actual[row * features + i], expected[i],
                    StoredTolerance(kEpsilonBf16, 128, 64, expected[i]))
            << "row " << row << " feature " << i;
      }
    }
    CheckParts(adapters, launch.down, down.Read(), actual, kLoraGateFeatures);
  }

  static constexpr int64_t kHidden = 600;
  DecodeAdapters adapters;
  int64_t rows, features, shift;
  std::vector<float> in_values, bias_values, squares_values;
  DeviceArray in, bias, out;
  DeviceBuffer<float> down;
  std::unique_ptr<DeviceBuffer<float>> squares;
  LoraGate launch;
};

void CheckGate(const Gate& gate) {
  gate.Run();
  gate.Check();
}

TEST_F(CudaLoraDecodeTest, GatesMixedRowsWithEveryActivation) {
  const DecodeProblem problem = MixedDecode({776, 776}, 776, 0);
  CheckGate(Gate(problem));
  CheckGate(Gate(problem, GateActivation::kGeluTanh, /*has_bias=*/false));
  CheckGate(Gate(problem, GateActivation::kClampedSilu));
}

TEST_F(CudaLoraDecodeTest, GatesWhatLiesAnywhere) {
  CheckGate(Gate(MixedDecode({101, 101}, 101, 0)));
  CheckGate(Gate(MixedDecode({264, 264}, 264, 3)));
}

TEST_F(CudaLoraDecodeTest, GatesManyRows) {
  CheckGate(Gate(ManyItems({24, 24}, 24, /*tiles=*/1)));
}

// The widths are those of Llama-3.1-8B and SmolLM2.
TEST_F(CudaLoraDecodeTest, GatesTheWidthsOfServedModels) {
  CheckGate(Gate(OneRow({14336, 14336}, 14336, 8, 8)));
  CheckGate(Gate(OneRow({1536, 1536}, 1536, 128, 128)));
}

// The launch has no deferred norm and no adapters for down.
TEST_F(CudaLoraDecodeTest, GatesNormedRows) {
  Gate gate(MixedDecode({520, 520}, 520, 0));
  gate.launch.norm = {};
  gate.launch.down = {};
  gate.Run();
  const auto parts = static_cast<float>(LoraResidualParts(Gate::kHidden));
  gate.squares_values.assign(gate.squares_values.size(), Gate::kHidden / parts);
  const std::vector<float> actual = gate.out.Read();
  const std::vector<double> expected =
      reference::SwiGluRow(gate.Side(7, 0), gate.Side(7, 1));
  for (int64_t i = 0; i < gate.features; ++i) {
    ASSERT_NEAR(actual[7 * gate.features + i], expected[i],
                StoredTolerance(kEpsilonBf16, 128, 64, expected[i]) +
                    1e-4 * std::abs(expected[i]));
  }
  EXPECT_TRUE(std::isnan(gate.down.Read().front()));
}

TEST_F(CudaLoraDecodeTest, GivesARowTheSameBitsWithoutItsNeighbours) {
  const DecodeProblem narrow = MixedDecode({520}, 520, 0);
  const DecodeProblem wide = MixedDecode({520, 520}, 520, 0);
  const Residual residual(narrow);
  const Gate gate(wide);
  residual.Run();
  gate.Run();
  for (const int64_t row : {2, 10, 22}) {
    const Residual other_residual(WithBaseRowsAround(narrow, row));
    const Gate other_gate(WithBaseRowsAround(wide, row));
    other_residual.Run();
    other_gate.Run();
    const auto same = [&](const std::vector<float>& a,
                          const std::vector<float>& b) {
      const auto each = static_cast<int64_t>(a.size()) / narrow.num_rows;
      const auto x = Slice(a, row * each, each), y = Slice(b, row * each, each);
      for (int64_t i = 0; i < each; ++i) {
        ASSERT_TRUE(x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i])))
            << "row " << row << " element " << i;
      }
    };
    same(residual.y.Read(), other_residual.y.Read());
    same(residual.scaled.Read(), other_residual.scaled.Read());
    same(residual.squares.Read(), other_residual.squares.Read());
    same(residual.next.Read(), other_residual.next.Read());
    same(gate.out.Read(), other_gate.out.Read());
    same(gate.down.Read(), other_gate.down.Read());
  }
}

TEST_F(CudaLoraDecodeTest, KeepsNanInItsRow) {
  const Residual residual(MixedDecode({520}, 520, 0));
  const Gate gate(MixedDecode({520, 520}, 520, 0));
  const uint16_t nan = ToBf16(kNan);
  for (void* at : {residual.x.at(9 * 520 + 300), gate.in.at(9 * 1040 + 300)}) {
    ASSERT_EQ(cudaMemcpy(at, &nan, sizeof nan, cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  residual.Run();
  gate.Run();
  const std::vector<float> sum = residual.y.Read(), out = gate.out.Read();
  for (int64_t i = 0; i < residual.rows * 520; ++i) {
    ASSERT_EQ(std::isnan(sum[i]), i == 9 * 520 + 300) << i;
    ASSERT_EQ(std::isnan(out[i]), i == 9 * 520 + 300) << i;
  }
  const std::vector<float> squares = residual.squares.Read();
  for (size_t i = 0; i < squares.size(); ++i) {
    ASSERT_EQ(std::isnan(squares[i]), i == 9 * 3 + 1) << i;
  }
  // In row 9, the part that sums over the NaN's feature is NaN. The kernels do
  // not write ranks that a row's adapter lacks, so these ranks keep their
  // initial NaN.
  const auto check_parts = [&](const LoraParts& parts,
                               const std::vector<float>& values, int64_t own) {
    for (int64_t i = 0; i < residual.rows * parts.count * parts.stride; ++i) {
      const int64_t row = i / parts.stride / parts.count;
      const bool exists = i % parts.stride < residual.adapters.RankOfA(row);
      ASSERT_EQ(std::isnan(values[i]),
                !exists || i / parts.stride == 9 * parts.count + own)
          << i;
    }
  };
  check_parts(residual.launch.next, residual.next.Read(), 1);
  check_parts(gate.launch.down, gate.down.Read(), 0);
}

TEST_F(CudaLoraDecodeTest, TakesNothing) {
  EXPECT_EQ(RunLoraResidual({}, nullptr), cudaSuccess);
  EXPECT_EQ(RunLoraGate({}, nullptr), cudaSuccess);
  EXPECT_EQ(RunLoraHeads({}, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace weft::kernels::cuda
