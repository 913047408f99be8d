#include "src/loss/fused_head.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "src/loss/head_coefficients.h"
#include "src/loss/head_lora.h"
#include "src/loss/head_products.h"
#include "src/ops/vocab_rows.h"

namespace weft::loss {
namespace {

// A CPU's logits buffer is never in a cache at the sizes that GEMMs like (one
// thread, V 49152, H 576: 84 GFLOP/s at 1024 rows, 77 at 512, 72 at 256), so
// only its memory limits the chunk: large vocabularies take fewer rows.
constexpr int64_t kCpuBufferBytes = int64_t{256} << 20;
constexpr int64_t kCpuMinRows = 64;

// Rows whose targets' weights are gathered at a time.
constexpr int64_t kCombineRows = 1024;

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
c10::List<std::optional<at::Tensor>> EntryIndex(
    const ops::VocabRowsInput& input) {
  return c10::List<std::optional<at::Tensor>>(
      {at::repeat_interleave(input.row_offsets.diff()), input.targets_E});
}

// The softcap's derivative at the chunk's targets; reads the raw logits.
void TargetSlope(const at::Tensor& logits_RV, const ops::VocabRowsInput& input,
                 at::Tensor& slope_E) {
  const at::Tensor tanh =
      (at::index(logits_RV, EntryIndex(input)) / input.softcap).tanh_();
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
                  rows.temperatures.size() == num_rows &&
                  (rows.filters.empty() || rows.filters.size() == num_rows),
              "the head has ", num_rows, " rows, ", rows.row_offsets.size(),
              " row offsets, ", rows.temperatures.size(), " temperatures and ",
              rows.filters.size(), " filters");
  TORCH_CHECK(
      rows.row_offsets.back() == static_cast<int64_t>(rows.targets.size()),
      "the head's last row offset is ", rows.row_offsets.back(), " for ",
      rows.targets.size(), " targets");
}

std::vector<double> ToDoubles(const at::Tensor& values) {
  const at::Tensor doubles = values.to(at::kCPU, at::kDouble).contiguous();
  const double* data = doubles.const_data_ptr<double>();
  return {data, data + doubles.numel()};
}

// Computes the logits of chunk after chunk; both passes run on it.
class ChunkRunner {
 public:
  ChunkRunner(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
              const ScoreRows& rows, const HeadOptions& options)
      : hidden_RH_(hidden_RH),
        weight_VH_(weight_VH),
        rows_(rows),
        softcap_(options.softcap),
        lora_(rows.routing, HeadComputeType(weight_VH)),
        chunk_(ChunkRows(options, hidden_RH.size(0), weight_VH.size(0),
                         weight_VH.is_cpu())) {}

  struct Chunk {
    int64_t begin = 0;
    int64_t count = 0;
    int64_t first_entry = 0;
    int64_t num_entries = 0;
    ops::VocabRowsInput input;
    at::Tensor logits_RV;
  };

  // Calls `visit` on the logits of every chunk that `wanted` says yes to.
  template <typename Wanted, typename Visit>
  void ForEach(const std::vector<at::Tensor>& shrunk_nR, Wanted wanted,
               Visit visit) const {
    const int64_t num_rows = hidden_RH_.size(0);
    for (int64_t begin = 0; begin < num_rows; begin += chunk_) {
      const int64_t count = std::min(chunk_, num_rows - begin);
      if (!wanted(begin, count)) continue;
      const int64_t first = rows_.row_offsets[begin];
      Chunk chunk{.begin = begin,
                  .count = count,
                  .first_entry = first,
                  .num_entries = rows_.row_offsets[begin + count] - first,
                  .input = ChunkInput(rows_, begin, count, softcap_,
                                      weight_VH_.device()),
                  .logits_RV = ComputeLogits(hidden_RH_.narrow(0, begin, count),
                                             weight_VH_)};
      lora_.AddLogits(shrunk_nR, begin, chunk.logits_RV);
      visit(chunk);
    }
  }

  [[nodiscard]] const HeadLora& lora() const { return lora_; }

 private:
  const at::Tensor& hidden_RH_;
  const at::Tensor& weight_VH_;
  const ScoreRows& rows_;
  const double softcap_;
  const HeadLora lora_;
  const int64_t chunk_;
};

// The logits of a chunk become its softmax * D, 0 at the rows' own targets.
void SoftmaxBesideTargets(ChunkRunner::Chunk& chunk, at::Tensor& logprobs_E,
                          at::Tensor& entropies_R) {
  ops::VocabRows(chunk.logits_RV, chunk.input, /*softmax_in_place=*/true,
                 logprobs_E, entropies_R);
  at::index_put_(chunk.logits_RV, EntryIndex(chunk.input),
                 at::zeros({}, chunk.logits_RV.options()));
}

// Turns the saved p W of rows [begin, begin + n), [n, X], into their dz W.
void Combine(at::Tensor& projection_nX, const at::Tensor& weight_VX,
             const ScoreRows& rows, const HeadCoefficients& coefficients,
             int64_t begin) {
  const auto dtype = projection_nX.options();
  const int64_t num_rows = projection_nX.size(0);
  for (int64_t done = 0; done < num_rows; done += kCombineRows) {
    const int64_t count = std::min(kCombineRows, num_rows - done);
    at::Tensor result_nX = projection_nX.narrow(0, done, count);
    const auto row_begin = coefficients.rows_R.begin() + begin + done;
    result_nX.mul_(at::tensor(std::vector<double>(row_begin, row_begin + count))
                       .to(dtype)
                       .unsqueeze(1));
    for (const EntryLayer& layer :
         LayerEntries(rows, coefficients.entries_E, begin + done, count)) {
      const at::Tensor scaled =
          weight_VX
              .index_select(
                  0, at::tensor(layer.targets, at::kLong).to(dtype.device()))
              .to(dtype)
              .mul_(at::tensor(layer.coefficients).to(dtype).unsqueeze(1));
      if (static_cast<int64_t>(layer.rows.size()) == count) {
        result_nX.add_(scaled);
      } else {
        result_nX.index_add_(
            0, at::tensor(layer.rows, at::kLong).to(dtype.device()), scaled);
      }
    }
  }
}

// dB of every segment, from logits computed again.
void AddGradientsOfB(const ChunkRunner& runner,
                     const std::vector<at::Tensor>& shrunk_nR,
                     const HeadCoefficients& coefficients) {
  const auto wanted = [&](int64_t begin, int64_t count) {
    return runner.lora().WantsGradientOfB(begin, count);
  };
  runner.ForEach(shrunk_nR, wanted, [&](ChunkRunner::Chunk& chunk) {
    const auto dtype = chunk.logits_RV.options();
    at::Tensor logprobs_E = at::empty({chunk.num_entries}, dtype);
    at::Tensor no_entropies;
    SoftmaxBesideTargets(chunk, logprobs_E, no_entropies);
    const auto row = coefficients.rows_R.begin() + chunk.begin;
    chunk.logits_RV.mul_(at::tensor(std::vector<double>(row, row + chunk.count))
                             .to(dtype)
                             .unsqueeze(1));
    const auto entry = coefficients.entries_E.begin() + chunk.first_entry;
    at::index_put_(
        chunk.logits_RV, EntryIndex(chunk.input),
        at::tensor(std::vector<double>(entry, entry + chunk.num_entries))
            .to(dtype),
        /*accumulate=*/true);
    runner.lora().AddGradientOfB(chunk.logits_RV, chunk.begin, shrunk_nR);
  });
}

}  // namespace

HeadResult ScoreHead(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                     const ScoreRows& rows, const HeadOptions& options,
                     bool want_gradient, bool want_entropy) {
  CheckRows(hidden_RH, rows);
  const auto dtype = weight_VH.options().dtype(HeadComputeType(weight_VH));
  HeadResult result = AllocateResult(
      hidden_RH.size(0), static_cast<int64_t>(rows.targets.size()),
      weight_VH.size(1), dtype, options.softcap > 0, want_gradient,
      want_entropy);
  if (hidden_RH.size(0) == 0) return result;
  const ChunkRunner runner(hidden_RH, weight_VH, rows, options);
  result.shrunk_nR = runner.lora().Shrink(hidden_RH);
  const auto all = [](int64_t, int64_t) { return true; };
  runner.ForEach(result.shrunk_nR, all, [&](ChunkRunner::Chunk& chunk) {
    const auto entries = [&](const at::Tensor& x_E) {
      return x_E.narrow(0, chunk.first_entry, chunk.num_entries);
    };
    if (result.target_slope_E.defined()) {
      at::Tensor slope_E = entries(result.target_slope_E);
      TargetSlope(chunk.logits_RV, chunk.input, slope_E);
    }
    at::Tensor logprobs_E = entries(result.logprobs_E);
    at::Tensor entropies_R;
    if (want_entropy) {
      entropies_R = result.entropies_R.narrow(0, chunk.begin, chunk.count);
    }
    if (!want_gradient) {
      ops::VocabRows(chunk.logits_RV, chunk.input, /*softmax_in_place=*/false,
                     logprobs_E, entropies_R);
      return;
    }
    SoftmaxBesideTargets(chunk, logprobs_E, entropies_R);
    at::Tensor projection_RH =
        result.projection_RH.narrow(0, chunk.begin, chunk.count);
    if (rows.filters.empty()) {
      ComputeProjection(chunk.logits_RV, weight_VH, projection_RH);
    } else {
      const auto first = rows.filters.begin() + chunk.begin;
      ComputeFilteredProjection(
          chunk.logits_RV, weight_VH,
          at::tensor(std::vector<float>(first, first + chunk.count)).to(dtype),
          projection_RH);
    }
    runner.lora().Project(chunk.logits_RV, chunk.begin, result.projected_nR);
  });
  return result;
}

at::Tensor HeadBackward(HeadResult forward, const at::Tensor& hidden_RH,
                        const at::Tensor& weight_VH, const ScoreRows& rows,
                        const HeadOptions& options, const at::Tensor& g_E) {
  TORCH_CHECK(forward.projection_RH.defined(),
              "HeadBackward needs want_gradient in the forward");
  TORCH_CHECK(g_E.numel() == static_cast<int64_t>(rows.targets.size()),
              "HeadBackward has ", g_E.numel(), " gradients for ",
              rows.targets.size(), " entries");
  const HeadCoefficients coefficients = MakeHeadCoefficients(
      rows, ToDoubles(g_E), ToDoubles(forward.logprobs_E),
      forward.target_slope_E.defined() ? ToDoubles(forward.target_slope_E)
                                       : std::vector<double>());
  at::Tensor dhidden_RH = std::move(forward.projection_RH);
  Combine(dhidden_RH, weight_VH, rows, coefficients, 0);
  if (std::ranges::any_of(forward.shrunk_nR, &at::Tensor::defined)) {
    const ChunkRunner runner(hidden_RH, weight_VH, rows, options);
    const HeadLora& lora = runner.lora();
    for (size_t s = 0; s < rows.routing.size(); ++s) {
      if (!lora.Trains(s)) continue;
      at::Tensor& ds_nR = forward.projected_nR[s];
      Combine(ds_nR, lora.B(s), rows, coefficients, rows.routing[s].begin);
      lora.AddGradientOfA(s, ds_nR, hidden_RH, dhidden_RH);
    }
    AddGradientsOfB(runner, forward.shrunk_nR, coefficients);
  }
  return dhidden_RH.to(weight_VH.scalar_type());
}

}  // namespace weft::loss
