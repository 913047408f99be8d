#include "src/loss/fused_head.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "src/ops/vocab_rows.h"

namespace weft::loss {
namespace {

// A CPU's logits buffer is never in a cache at the sizes that GEMMs like (one
// thread, V 49152, H 576: 84 GFLOP/s at 1024 rows, 77 at 512, 72 at 256), so
// only its memory limits the chunk: large vocabularies take fewer rows.
constexpr int64_t kCpuBufferBytes = int64_t{256} << 20;
constexpr int64_t kCpuMinRows = 64;

// Rows of a bf16 weight that a CPU widens at a time.
constexpr int64_t kWidenRows = 8192;

// For fewer rows BLAS libraries take matrix-vector kernels that sum a whole
// column one by one: over V 49152 a relative error of 1e-4, where blocked sums
// have 5e-7. So few rows are summed over this many vocabulary entries at a
// time.
constexpr int64_t kCpuFewRows = 64;
constexpr int64_t kCpuSumLength = 512;

// Dtype of logits, statistics and U: f64 for f64 weights, else f32.
at::ScalarType ComputeType(const at::Tensor& weight_VH) {
  return weight_VH.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

int64_t ChunkRows(const HeadOptions& options, int64_t num_rows, int64_t vocab,
                  bool is_cpu) {
  if (options.chunk_rows <= 0) return num_rows;
  int64_t chunk = std::min(num_rows, options.chunk_rows);
  if (is_cpu) {
    const int64_t fitting =
        kCpuBufferBytes / (vocab * static_cast<int64_t>(sizeof(float)));
    chunk = std::min(chunk, std::max(fitting, kCpuMinRows));
  }
  return chunk;
}

// The [chunk, V] buffer. Kept between calls on a CPU, where the first touch of
// fresh pages costs as much as the softmax; a GPU's allocator caches by itself.
// Unchunked calls do not keep their buffer: it may be huge.
at::Tensor LogitsBuffer(int64_t chunk, int64_t vocab,
                        const at::TensorOptions& options, bool keep) {
  if (!keep) return at::empty({chunk * vocab}, options);
  thread_local at::Tensor kept;
  if (!kept.defined() || kept.numel() < chunk * vocab ||
      kept.dtype() != options.dtype()) {
    kept = at::empty({chunk * vocab}, options);
  }
  return kept;
}

// logits = hidden W^T, with products and sums of at least f32.
void ComputeLogits(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                   at::Tensor& logits_RV) {
  if (hidden_RH.scalar_type() == logits_RV.scalar_type()) {
    at::mm_out(logits_RV, hidden_RH, weight_VH.t());
    return;
  }
  if (!hidden_RH.is_cpu()) {
    at::mm_out(logits_RV, hidden_RH, weight_VH.t(), logits_RV.scalar_type());
    return;
  }
  const at::Tensor wide_RH = hidden_RH.to(logits_RV.scalar_type());
  const int64_t vocab = weight_VH.size(0);
  for (int64_t v = 0; v < vocab; v += kWidenRows) {
    const int64_t count = std::min(kWidenRows, vocab - v);
    at::Tensor part = logits_RV.narrow(1, v, count);
    at::mm_out(part, wide_RH,
               weight_VH.narrow(0, v, count).to(logits_RV.scalar_type()).t());
  }
}

// U = p W.
void ComputeProjection(const at::Tensor& p_RV, const at::Tensor& weight_VH,
                       at::Tensor& projection_RH) {
  const bool same_type = p_RV.scalar_type() == weight_VH.scalar_type();
  const bool few_rows = p_RV.is_cpu() && p_RV.size(0) < kCpuFewRows;
  if (same_type && !few_rows) {
    at::mm_out(projection_RH, p_RV, weight_VH);
    return;
  }
  if (!p_RV.is_cpu()) {
    at::mm_out(projection_RH, p_RV.to(weight_VH.scalar_type()), weight_VH,
               projection_RH.scalar_type());
    return;
  }
  projection_RH.zero_();
  const int64_t vocab = weight_VH.size(0);
  const int64_t block = few_rows ? kCpuSumLength : kWidenRows;
  for (int64_t v = 0; v < vocab; v += block) {
    const int64_t count = std::min(block, vocab - v);
    // Not addmm: a matrix-vector kernel would go on adding one by one.
    projection_RH.add_(
        at::mm(p_RV.narrow(1, v, count),
               weight_VH.narrow(0, v, count).to(p_RV.scalar_type())));
  }
}

// The rows and entries of one chunk, on the device of the head.
ops::VocabRowsInput ChunkInput(const ScoreRows& rows, int64_t begin,
                               int64_t count, double softcap,
                               at::Device device) {
  const auto offsets = rows.row_offsets.begin() + begin;
  const int64_t first = offsets[0];
  const int64_t last = offsets[count];
  std::vector<int64_t> local(offsets, offsets + count + 1);
  for (int64_t& offset : local) offset -= first;
  const auto targets = rows.targets.begin();
  const auto temperatures = rows.temperatures.begin() + begin;
  return {.row_offsets = at::tensor(local, at::kLong).to(device),
          .targets_E =
              at::tensor(std::vector<int64_t>(targets + first, targets + last),
                         at::kLong)
                  .to(device),
          .temperature_R =
              at::tensor(std::vector<float>(temperatures, temperatures + count),
                         at::kFloat)
                  .to(device),
          .softcap = softcap};
}

// Row and column of every entry in [chunk, V].
std::vector<at::indexing::TensorIndex> EntryIndex(
    const ops::VocabRowsInput& input) {
  return {at::repeat_interleave(input.row_offsets.diff()), input.targets_E};
}

// The softcap's derivative at the chunk's targets; reads the raw logits.
void TargetSlope(const at::Tensor& logits_RV, const ops::VocabRowsInput& input,
                 at::Tensor& slope_E) {
  const at::Tensor tanh =
      (logits_RV.index(EntryIndex(input)) / input.softcap).tanh_();
  slope_E.copy_(1 - tanh.square());
}

HeadResult AllocateResult(int64_t num_rows, int64_t num_entries, int64_t hidden,
                          const at::TensorOptions& options, bool has_softcap,
                          bool want_gradient, bool want_entropy) {
  HeadResult result;
  result.logprobs_E = at::empty({num_entries}, options);
  if (want_entropy) result.entropies_R = at::empty({num_rows}, options);
  if (want_gradient) {
    result.projection_RH = at::empty({num_rows, hidden}, options);
    if (has_softcap) result.target_slope_E = at::empty({num_entries}, options);
  }
  return result;
}

void CheckRows(const at::Tensor& hidden_RH, const ScoreRows& rows) {
  const size_t num_rows = static_cast<size_t>(hidden_RH.size(0));
  TORCH_CHECK(rows.row_offsets.size() == num_rows + 1 &&
                  rows.temperatures.size() == num_rows,
              "the head has ", num_rows, " rows, ", rows.row_offsets.size(),
              " row offsets and ", rows.temperatures.size(), " temperatures");
  TORCH_CHECK(
      rows.row_offsets.back() == static_cast<int64_t>(rows.targets.size()),
      "the head's last row offset is ", rows.row_offsets.back(), " for ",
      rows.targets.size(), " targets");
}

// What multiplies W_t of every entry and U of every row.
struct Coefficients {
  std::vector<double> entries_E;
  std::vector<double> rows_R;
};

// Arguments: gradients_E = dLoss/dlogprob.
Coefficients MakeCoefficients(const ScoreRows& rows,
                              std::vector<double> gradients_E,
                              const std::vector<double>& logprobs_E) {
  const size_t num_rows = rows.temperatures.size();
  Coefficients result{.entries_E = std::move(gradients_E), .rows_R = {}};
  result.rows_R.reserve(num_rows);
  for (size_t r = 0; r < num_rows; ++r) {
    const int64_t first = rows.row_offsets[r];
    const int64_t last = rows.row_offsets[r + 1];
    double sum = 0;
    for (int64_t e = first; e < last; ++e) {
      result.entries_E[e] /= static_cast<double>(rows.temperatures[r]);
      sum += result.entries_E[e];
    }
    for (int64_t e = first; e < last; ++e) {
      // A target named twice has one probability: its first entry takes it.
      const auto begin = rows.targets.begin();
      const auto own = begin + e;
      if (std::find(begin + first, own, *own) != own) continue;
      double& c = result.entries_E[e];
      c = c * -std::expm1(logprobs_E[e]) - (sum - c) * std::exp(logprobs_E[e]);
    }
    result.rows_R.push_back(-sum);
  }
  return result;
}

// Entries of equal rank within their row: at most one of each row, so that
// adding them to their rows is free of collisions and its order is fixed.
struct EntryLayer {
  std::vector<int64_t> rows;
  std::vector<int64_t> targets;
  std::vector<double> coefficients;
};

std::vector<EntryLayer> LayerEntries(const ScoreRows& rows,
                                     const std::vector<double>& coefficients) {
  std::vector<EntryLayer> layers;
  for (size_t r = 0; r + 1 < rows.row_offsets.size(); ++r) {
    const int64_t first = rows.row_offsets[r];
    for (int64_t e = first; e < rows.row_offsets[r + 1]; ++e) {
      const size_t rank = e - first;
      if (rank == layers.size()) layers.emplace_back();
      layers[rank].rows.push_back(static_cast<int64_t>(r));
      layers[rank].targets.push_back(rows.targets[e]);
      layers[rank].coefficients.push_back(coefficients[e]);
    }
  }
  return layers;
}

std::vector<double> ToDoubles(const at::Tensor& values) {
  const at::Tensor doubles = values.to(at::kCPU, at::kDouble).contiguous();
  const double* data = doubles.const_data_ptr<double>();
  return {data, data + doubles.numel()};
}

}  // namespace

HeadResult ScoreHead(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                     const ScoreRows& rows, const HeadOptions& options,
                     bool want_gradient, bool want_entropy) {
  CheckRows(hidden_RH, rows);
  const int64_t num_rows = hidden_RH.size(0);
  const int64_t vocab = weight_VH.size(0);
  const auto dtype = weight_VH.options().dtype(ComputeType(weight_VH));
  HeadResult result = AllocateResult(
      num_rows, static_cast<int64_t>(rows.targets.size()), weight_VH.size(1),
      dtype, options.softcap > 0, want_gradient, want_entropy);
  if (num_rows == 0) return result;
  const bool is_cpu = weight_VH.is_cpu();
  const int64_t chunk = ChunkRows(options, num_rows, vocab, is_cpu);
  const at::Tensor buffer =
      LogitsBuffer(chunk, vocab, dtype, is_cpu && options.chunk_rows > 0);
  for (int64_t begin = 0; begin < num_rows; begin += chunk) {
    const int64_t count = std::min(chunk, num_rows - begin);
    const int64_t first = rows.row_offsets[begin];
    const int64_t entries = rows.row_offsets[begin + count] - first;
    at::Tensor logits = buffer.narrow(0, 0, count * vocab).view({count, vocab});
    ComputeLogits(hidden_RH.narrow(0, begin, count), weight_VH, logits);
    const ops::VocabRowsInput input =
        ChunkInput(rows, begin, count, options.softcap, weight_VH.device());
    if (result.target_slope_E.defined()) {
      at::Tensor slope = result.target_slope_E.narrow(0, first, entries);
      TargetSlope(logits, input, slope);
    }
    at::Tensor logprobs = result.logprobs_E.narrow(0, first, entries);
    at::Tensor entropies;
    if (want_entropy) entropies = result.entropies_R.narrow(0, begin, count);
    ops::VocabRows(logits, input, want_gradient, logprobs, entropies);
    if (want_gradient) {
      logits.index_put_(EntryIndex(input), at::zeros({}, logits.options()));
      at::Tensor projection = result.projection_RH.narrow(0, begin, count);
      ComputeProjection(logits, weight_VH, projection);
    }
  }
  return result;
}

at::Tensor HeadBackward(const HeadResult& forward, const at::Tensor& weight_VH,
                        const ScoreRows& rows, const at::Tensor& g_E) {
  TORCH_CHECK(forward.projection_RH.defined(),
              "HeadBackward needs want_gradient in the forward");
  const auto dtype = forward.projection_RH.options();
  const int64_t num_rows = forward.projection_RH.size(0);
  const std::vector<double> gradients_E = ToDoubles(g_E);
  TORCH_CHECK(gradients_E.size() == rows.targets.size(), "HeadBackward has ",
              gradients_E.size(), " gradients for ", rows.targets.size(),
              " entries");
  Coefficients coefficients =
      MakeCoefficients(rows, gradients_E, ToDoubles(forward.logprobs_E));
  if (forward.target_slope_E.defined()) {
    const std::vector<double> slopes = ToDoubles(forward.target_slope_E);
    for (size_t e = 0; e < slopes.size(); ++e) {
      coefficients.entries_E[e] *= slopes[e];
    }
  }
  at::Tensor dhidden_RH =
      forward.projection_RH *
      at::tensor(coefficients.rows_R).to(dtype).unsqueeze(1);
  for (const EntryLayer& layer : LayerEntries(rows, coefficients.entries_E)) {
    const at::Tensor targets =
        at::tensor(layer.targets, at::kLong).to(dtype.device());
    const at::Tensor scaled =
        weight_VH.index_select(0, targets)
            .to(dtype)
            .mul_(at::tensor(layer.coefficients).to(dtype).unsqueeze(1));
    if (static_cast<int64_t>(layer.rows.size()) == num_rows) {
      dhidden_RH.add_(scaled);
    } else {
      dhidden_RH.index_add_(
          0, at::tensor(layer.rows, at::kLong).to(dtype.device()), scaled);
    }
  }
  return dhidden_RH.to(weight_VH.scalar_type());
}

}  // namespace weft::loss
