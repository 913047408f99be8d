// Times the kernels of the gated delta rule at the widths of Qwen3-Next, for
// one long sequence and for several. Compares each with a copy that moves the
// bytes that it must read and write.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cuda/delta/gated_delta.h"
#include "tests/bench/kernels_cuda/bench.h"
#include "tests/kernels/cpu/gated_delta_reference.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cuda::bench {
namespace {

using cpu::reference::DeltaHead;

constexpr int64_t kRows = 8192, kChunkRows = 64;
constexpr int64_t kKeyHeads = 16, kHeads = 32, kKeys = 128, kValues = 128;
constexpr int64_t kAllKeys = kKeyHeads * kKeys, kAllValues = kHeads * kValues;
constexpr int64_t kWidth = 2 * kAllKeys + kAllValues;
constexpr int64_t kState = kHeads * kKeys * kValues;
constexpr int64_t kSlices = kValues / 64;
// Makes keys of length 1 in the mean.
const float kLimit = std::sqrt(3.0F / kKeys);

std::vector<float> Fractions(int64_t count, float low, float high) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = low + (high - low) * static_cast<float>(i * 7919 % 1009) / 1009;
  }
  return values;
}

struct Rows {
  Bf16Buffer mixed{kRows * kWidth, kLimit};
  FloatBuffer beta{Fractions(kRows * kHeads, 0.1F, 0.9F)};
  FloatBuffer g{Fractions(kRows * kHeads, -0.2F, 0)};
  DeltaRuleRows rule{.mixed_TW = mixed.data(),
                     .beta_TH = beta.data(),
                     .g_TH = g.data(),
                     .num_key_heads = kKeyHeads,
                     .num_value_heads = kHeads,
                     .key_features = kKeys,
                     .value_features = kValues};
};

// The rows, divided into sequences of equal length. The states have indices
// that keep them all, or one place for each sequence.
struct Sequences {
  explicit Sequences(int64_t of_count) : count(of_count) {
    const int64_t size = kRows / count;
    for (int64_t row = 0; row < kRows; row += kChunkRows) {
      const int64_t tree = row / size;
      const bool is_first = row % size == 0;
      const bool is_last = (row + kChunkRows) % size == 0;
      if (is_first) trees.push_back(std::ssize(kept));
      const int64_t start = is_first ? -1 : num_states - 1;
      kept.push_back(
          {row, row + kChunkRows, start, is_last ? -1 : num_states++});
      replaced.push_back(
          {row, row + kChunkRows, is_first ? -1 : tree, is_last ? -1 : tree});
    }
    trees.push_back(std::ssize(kept));
  }

  int64_t count, num_states = 0;
  std::vector<DeltaChunkRange> kept, replaced;
  std::vector<int64_t> trees;
};

class DeltaProblem {
 public:
  DeltaProblem(const Rows& rows, const Sequences& sequences)
      : rows_(rows),
        sequences_(sequences),
        kept_(sequences.kept),
        replaced_(sequences.replaced),
        tree_chunks_(sequences.trees),
        states_(sequences.num_states * kState),
        dstops_(sequences.num_states * kState),
        dstates_(std::vector<float>(
            static_cast<size_t>(sequences.count * kState), 0.0F)) {
    gradient_ = {.kept_chunks = kept_.data(),
                 .states_SHKV = states_.data(),
                 .u_THV = u_.data(),
                 .dout_THV = dout_.data(),
                 .dstates_SHKV = dstates_.data(),
                 .dstops_SHKV = dstops_.data(),
                 .dr_THV = dr_.data(),
                 .dq = dq_.data(),
                 .dk = dk_.data(),
                 .dbeta = dbeta_.data(),
                 .dg = dg_.data(),
                 .dv_THV = dv_.data()};
  }

  void Score() const {
    Check(ScoreDeltaChunks(rows_.rule, Trees(kept_), scores_, nullptr));
  }
  void Forward() const {
    Check(RunDeltaChunks(rows_.rule, Trees(kept_), scores_,
                         {states_.data(), u_.data(), out_.data()}, nullptr));
  }
  void StatesBackward() const {
    Check(RunDeltaStatesBackward(rows_.rule, Trees(replaced_), scores_,
                                 gradient_, nullptr));
  }
  void RowsBackward() const {
    Check(RunDeltaRowsBackward(rows_.rule, Trees(replaced_), scores_, gradient_,
                               nullptr));
  }

  // Runs all kernels once, and compares the first sequence of a head with the
  // rule in f64.
  void CheckHead() const {
    Score();
    Forward();
    StatesBackward();
    RowsBackward();
    const int64_t size = kRows / sequences_.count;
    const DeltaHead head = Head(size);
    const auto want = cpu::reference::RunDelta(head);
    const std::vector<double> dout = Columns(dout_, kAllValues, size, kValues);
    const DeltaHead d = cpu::reference::RunDeltaBackward(
        head, dout, std::vector<double>(kKeys * kValues, 0.0));
    // Each number goes through at most four products, which round both operands
    // to bf16, in each direction.
    constexpr double kError = 4 * 2 * kEpsilonBf16 / 2;
    CheckClose(Columns(out_, kAllValues, size, kValues), want.out, kError,
               "out");
    CheckClose(Columns(dv_, kAllValues, size, kValues), d.v, 2 * kError, "dv");
    CheckClose(Slices(dq_, size, kKeys), d.q, 2 * kError, "dq");
    CheckClose(Slices(dk_, size, kKeys), d.k, 2 * kError, "dk");
    CheckClose(Slices(dbeta_, size, 1), d.beta, 2 * kError, "dbeta");
    CheckClose(Slices(dg_, size, 1), d.g, 2 * kError, "dg");
  }

 private:
  DeltaTrees Trees(const Buffer<DeltaChunkRange>& chunks) const {
    return {chunks.data(), tree_chunks_.data(), sequences_.count,
            std::ssize(sequences_.kept)};
  }
  // Returns the columns of the first head in the first rows.
  template <typename T>
  static std::vector<double> Columns(const Buffer<T>& x, int64_t stride,
                                     int64_t size, int64_t count,
                                     int64_t begin = 0) {
    std::vector<double> values;
    for (int64_t row = 0; row < size; ++row) {
      const std::vector<float> own = x.Floats(begin + row * stride, count);
      values.insert(values.end(), own.begin(), own.end());
    }
    return values;
  }
  static std::vector<double> Slices(const FloatBuffer& x, int64_t size,
                                    int64_t count) {
    std::vector<double> sums(static_cast<size_t>(size * count), 0.0);
    for (int64_t slice = 0; slice < kSlices; ++slice) {
      const std::vector<double> part = Columns(x, kHeads * count, size, count,
                                               slice * kRows * kHeads * count);
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += part[i];
    }
    return sums;
  }
  DeltaHead Head(int64_t size) const {
    return {.num_rows = size,
            .key_features = kKeys,
            .value_features = kValues,
            .q = Columns(rows_.mixed, kWidth, size, kKeys),
            .k = Columns(rows_.mixed, kWidth, size, kKeys, kAllKeys),
            .v = Columns(rows_.mixed, kWidth, size, kValues, 2 * kAllKeys),
            .beta = Columns(rows_.beta, kHeads, size, 1),
            .g = Columns(rows_.g, kHeads, size, 1),
            .start = std::vector<double>(kKeys * kValues, 0.0)};
  }
  static void CheckClose(const std::vector<double>& actual,
                         const std::vector<double>& expected, double error,
                         const std::string& what) {
    double norm = 0, difference = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      norm += expected[i] * expected[i];
      difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    }
    Check(difference <= error * error * norm, "gated delta rule: " + what);
  }

  const Rows& rows_;
  const Sequences& sequences_;
  const Buffer<DeltaChunkRange> kept_, replaced_;
  const Buffer<int64_t> tree_chunks_;
  const FloatBuffer states_;
  const Bf16Buffer dstops_;
  const FloatBuffer dstates_;
  const Bf16Buffer w_{kRows * kHeads * kChunkRows},
      inverse_{kRows * kHeads * kChunkRows}, rest_{kRows * kHeads * kChunkRows};
  const DeltaScores scores_{w_.data(), inverse_.data(), rest_.data(), kRows};
  const Bf16Buffer u_{kRows * kAllValues}, out_{kRows * kAllValues},
      dout_{kRows * kAllValues}, dr_{kRows * kAllValues};
  const FloatBuffer dq_{kSlices * kRows * kHeads * kKeys},
      dk_{kSlices * kRows * kHeads * kKeys}, dv_{kRows * kAllValues},
      dbeta_{kSlices * kRows * kHeads}, dg_{kSlices * kRows * kHeads};
  DeltaChunksGradient gradient_;
};

void BenchChunks(const Device& device, const Rows& rows) {
  constexpr double kScoresBytes = 3.0 * 2 * kRows * kHeads * kChunkRows;
  constexpr double kKeysBytes = 2.0 * 2 * kRows * kAllKeys;
  constexpr double kValuesBytes = 2.0 * kRows * kAllValues;
  constexpr double kStatesBytes = 4.0 * kRows / kChunkRows * kState;
  for (const int64_t count : {1, 4, 16}) {
    const Sequences sequences(count);
    const DeltaProblem problem(rows, sequences);
    if (count == 16) problem.CheckHead();
    const auto line = [&](const char* name, double bytes, const auto& run) {
      Line(name).Add("sequences", count).AddBytes(device, bytes, run).Print();
    };
    line("ScoreDeltaChunks", kKeysBytes + kScoresBytes,
         [&] { problem.Score(); });
    line("RunDeltaChunks",
         kKeysBytes + kScoresBytes + 3 * kValuesBytes + kStatesBytes,
         [&] { problem.Forward(); });
    line("RunDeltaStatesBackward",
         kKeysBytes + kScoresBytes + 4 * kValuesBytes + kStatesBytes / 2,
         [&] { problem.StatesBackward(); });
    line("RunDeltaRowsBackward",
         kKeysBytes + kScoresBytes / 3 + 4 * kValuesBytes + kStatesBytes * 1.5 +
             2.0 * 4 * kSlices * kRows * kHeads * kKeys,
         [&] { problem.RowsBackward(); });
  }
}

void BenchMix(const Device& device) {
  constexpr int64_t kTaps = 4, kStride = kWidth + kAllValues + 2 * kHeads;
  std::vector<int64_t> earlier, offsets = {0};
  std::vector<DeltaLaterRow> later;
  for (int64_t t = 0; t < kRows; ++t) {
    for (int64_t r = 1; r < kTaps; ++r) {
      earlier.push_back(t < kTaps - r ? -1 : t - kTaps + r);
      if (t + r < kRows) {
        later.push_back(
            {static_cast<int32_t>(t + r), static_cast<int32_t>(kTaps - 1 - r)});
      }
    }
    offsets.push_back(std::ssize(later));
  }
  const Bf16Buffer x(kRows * kStride), weight(kTaps * kWidth),
      mixed(kRows * kWidth), dx(kRows * kStride);
  const FloatBuffer heads(kHeads), gates(2 * kRows * kHeads), d(kRows * kWidth);
  const Buffer<int64_t> earlier_rows(earlier), later_offsets(offsets);
  const Buffer<DeltaLaterRow> later_rows(later);
  const DeltaMixRows rows{.dtype = DType::kBf16,
                          .weight_dtype = DType::kBf16,
                          .num_rows = kRows,
                          .num_features = kWidth,
                          .num_taps = kTaps,
                          .num_key_heads = kKeyHeads,
                          .key_features = kKeys,
                          .num_value_heads = kHeads,
                          .l2_eps = 1e-6F,
                          .x_TW = x.data(),
                          .x_stride = kStride,
                          .earlier_TR = earlier_rows.data(),
                          .weight_RW = weight.data(),
                          .beta_TH = x.data() + kWidth + kAllValues,
                          .beta_stride = kStride,
                          .alpha_TH = x.data() + kWidth + kAllValues + kHeads,
                          .alpha_stride = kStride,
                          .a_log_H = heads.data(),
                          .dt_bias_H = heads.data()};
  constexpr double kNarrow = 2.0 * kRows * kWidth, kWide = 2 * kNarrow;
  Line("MixDeltaRows")
      .AddBytes(device, 2 * kNarrow,
                [&] {
                  Check(MixDeltaRows(rows, mixed.data(), gates.data(),
                                     gates.data() + kRows * kHeads, nullptr));
                })
      .Print();
  Line("MixDeltaRowsBackward")
      .AddBytes(device, kNarrow + 2 * kWide,
                [&] { Check(MixDeltaRowsBackward(rows, d.data(), nullptr)); })
      .Print();
  Line("DeltaConvBackward")
      .AddBytes(device, kWide + kNarrow,
                [&] {
                  Check(DeltaConvBackward(
                      rows, {later_offsets.data(), later_rows.data()}, d.data(),
                      dx.data(), kStride, nullptr));
                })
      .Print();
}

void BenchStep(const Device& device, const Rows& rows) {
  constexpr int64_t kMost = 64;
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < kMost; ++i) slots.push_back(i);
  const Buffer<int64_t> slots_device(slots);
  const FloatBuffer states(kMost * kState);
  const Bf16Buffer out(kMost * kAllValues);
  for (const int64_t count : {int64_t{1}, int64_t{8}, kMost}) {
    Line("DeltaStep")
        .Add("rows", count)
        .AddBytes(device, 8.0 * static_cast<double>(count * kState),
                  [&] {
                    Check(DeltaStep(rows.rule, count, slots_device.data(),
                                    /*padding_slot=*/-1, states.data(),
                                    DType::kBf16, out.data(), nullptr));
                  })
        .Print();
  }
}

}  // namespace

void BenchDelta(const Device& device) {
  const Rows rows;
  BenchChunks(device, rows);
  BenchMix(device);
  BenchStep(device, rows);
}

}  // namespace weft::kernels::cuda::bench
