#include "src/loss/head_chunks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <limits>

#include "src/loss/head_products.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"
#include "src/ops/vocab_rows.h"

namespace weft::loss {
namespace {

// The largest size of the logits buffer on a CPU, unless kCpuMinRows rows need
// more. A large vocabulary reduces the rows of a chunk accordingly. The limit
// only saves memory: products are faster with more rows, although no cache
// holds the buffer. With one thread, V 49152 and H 576: 84 GFLOP/s at 1024
// rows, 77 at 512, 72 at 256.
constexpr int64_t kCpuBufferBytes = int64_t{256} << 20;
constexpr int64_t kCpuMinRows = 64;

// Returns a buffer for [chunk, V]. With `keep`, the thread keeps the buffer for
// its next call, because on a CPU the first use of new memory pages costs as
// much as the softmax. A GPU's allocator caches memory itself. `index` tells
// apart buffers that are used together.
at::Tensor LogitsBuffer(int64_t chunk, int64_t vocab,
                        const at::TensorOptions& options, bool keep,
                        size_t index) {
  if (!keep) return at::empty({chunk * vocab}, options);
  thread_local std::array<at::Tensor, 2> all_kept;
  at::Tensor& kept = all_kept[index];
  if (!kept.defined() || kept.numel() < chunk * vocab ||
      kept.dtype() != options.dtype()) {
    kept = at::empty({chunk * vocab}, options);
  }
  return kept;
}

// Uploads the rows once, for all chunks.
DeviceRows Upload(const ScoreRows& rows, const HeadOptions& options,
                  at::Device device) {
  DeviceRows uploaded = {
      .row_offsets = ops::ToDevice(rows.row_offsets, device),
      .targets_E = ops::ToDevice(rows.targets, device),
      .temperature_R = ops::ToDevice(rows.temperatures, device)};
  if (options.softcap > 0 || options.shard.group != nullptr) {
    uploaded.rows_E = ops::ToDevice(RowsOfEntries(rows), device);
  }
  return uploaded;
}

// Returns the size of the largest part of the vocabulary on a rank. All ranks
// compute their chunks from this size, because the exchange for each chunk
// requires the same chunks on all ranks.
int64_t LargestVocab(const at::Tensor& weight_VH, const VocabShard& shard) {
  if (shard.group == nullptr) return weight_VH.size(0);
  const int size = shard.group->shard().size;
  return (shard.vocab + size - 1) / size;
}

using parallel::Range;

// The value of an entry that another rank has. It is below all finite numbers.
constexpr double kAbsent = -std::numeric_limits<double>::infinity();

Range RangeOf(const VocabShard& shard) {
  return shard.group->shard().Of(shard.vocab);
}

bool Contains(const Range& range, int64_t target) {
  return target >= range.begin && target < range.end;
}

// The index of the largest logit of each row, and its value after softcap and
// temperature.
struct LargestLogits {
  at::Tensor index_R;
  at::Tensor value_R;  // f64.
};

LargestLogits FindLargest(const HeadChunk& chunk) {
  const auto [raw_R, index_R] = chunk.logits_RV.max(1);
  at::Tensor value_R = raw_R.to(at::kDouble);
  const double softcap = chunk.input.softcap;
  if (softcap > 0) value_R = (value_R / softcap).tanh_().mul_(softcap);
  return {index_R, value_R.div_(chunk.input.temperature_R)};
}

// Returns f64 values for all entries [E] of the chunk. This rank's own entries
// have the values `values_O`; all others are kAbsent.
at::Tensor AmongAll(const at::Tensor& values_O, const at::Tensor& entries_O,
                    int64_t num_entries) {
  const auto options = values_O.options().dtype(at::kDouble);
  return at::full({num_entries}, kAbsent, options)
      .index_put_({entries_O}, values_O.to(at::kDouble));
}

// The scores that follow from the rank's own logits alone.
struct LocalScores {
  at::Tensor lse_R;  // f64.
  at::Tensor logprobs_O;
  at::Tensor entropies_R;  // Undefined if not wanted.
};

// Computes the local scores. The log-sum-exp is the largest logit minus its
// log-probability. In a confident row this log-probability is near 0, so
// the subtraction loses no digits.
LocalScores ScoreLocally(HeadChunk& chunk, bool want_gradient,
                         bool want_entropy) {
  const int64_t num_rows = chunk.count;
  const at::Tensor& targets_O = chunk.input.targets_E;
  const LargestLogits largest = FindLargest(chunk);
  // Adds each row's largest logit as a target before the row's other targets.
  const auto index = targets_O.options();
  ops::VocabRowsInput input = chunk.input;
  input.row_offsets = chunk.input.row_offsets - chunk.first_entry +
                      at::arange(num_rows + 1, index);
  const at::Tensor places_R = input.row_offsets.narrow(0, 0, num_rows);
  const at::Tensor places_O =
      at::arange(1, targets_O.numel() + 1, index) + chunk.RowsOfEntries();
  input.targets_E = at::empty({targets_O.numel() + num_rows}, index);
  input.targets_E.index_put_({places_R}, largest.index_R);
  input.targets_E.index_put_({places_O}, targets_O);

  const auto options = chunk.logits_RV.options();
  at::Tensor logprobs = at::empty({input.targets_E.numel()}, options);
  LocalScores scores;
  if (want_entropy) scores.entropies_R = at::empty({num_rows}, options);
  const SupportScores supported =
      chunk.supports.Score(chunk.logits_RV, chunk.input);
  ops::VocabRows(chunk.logits_RV, input, want_gradient, logprobs,
                 scores.entropies_R);
  scores.lse_R =
      largest.value_R - logprobs.index_select(0, places_R).to(at::kDouble);
  scores.logprobs_O = logprobs.index_select(0, places_O);
  chunk.supports.PutLogSums(supported, scores.lse_R);
  chunk.supports.PutScores(supported, scores.logprobs_O, scores.entropies_R);
  if (want_gradient) {
    chunk.supports.PutSoftmax(supported, chunk.input, chunk.logits_RV);
  }
  return scores;
}

// Computes the scores from `told_SX`, the values that all S ranks sent: the
// log-sum-exp of each row, the log-probability of each entry, and slopes and
// entropies if they are wanted.
void Merge(at::Tensor told_SX, int64_t num_rows, const at::Tensor& rows_E,
           int rank, ChunkScores& scores) {
  const auto take = [&told_SX](int64_t count) {
    const at::Tensor front = told_SX.narrow(1, 0, count);
    told_SX = told_SX.narrow(1, count, told_SX.size(1) - count);
    return front;
  };
  const int64_t num_entries = rows_E.numel();
  const at::Tensor lse_SR = take(num_rows);
  const at::Tensor log_share_SR = lse_SR - lse_SR.logsumexp(0);
  const at::Tensor share_SR = log_share_SR.exp();
  // For each entry, all ranks except one sent kAbsent. amax picks the other
  // rank's value, even if it is NaN.
  scores.logprobs_E.copy_(
      (take(num_entries) + log_share_SR.index_select(1, rows_E)).amax(0));
  if (scores.slopes_E.defined()) {
    scores.slopes_E.copy_(take(num_entries).amax(0));
  }
  if (scores.entropies_R.defined()) {
    // A rank without any token of a row's support has the share 0, and no
    // entropy.
    const at::Tensor parts_SR = share_SR * (take(num_rows) - log_share_SR);
    scores.entropies_R.copy_(
        at::where(share_SR == 0, at::zeros({}, parts_SR.options()), parts_SR)
            .sum(0));
  }
  if (scores.share_R.defined()) scores.share_R.copy_(share_SR[rank]);
}

}  // namespace

int64_t HeadChunkRows(const HeadOptions& options, int64_t num_rows,
                      int64_t vocab, bool is_cpu) {
  if (options.chunk_rows <= 0) return num_rows;
  int64_t chunk = std::min(num_rows, options.chunk_rows);
  if (is_cpu) {
    const int64_t fitting =
        kCpuBufferBytes / (vocab * static_cast<int64_t>(sizeof(float)));
    chunk = std::min(chunk, std::max(fitting, kCpuMinRows));
  }
  return chunk;
}

std::vector<int64_t> RowsOfEntries(const ScoreRows& rows) {
  std::vector<int64_t> rows_E;
  rows_E.reserve(rows.targets.size());
  for (size_t r = 0; r + 1 < rows.row_offsets.size(); ++r) {
    rows_E.insert(rows_E.end(), rows.row_offsets[r + 1] - rows.row_offsets[r],
                  static_cast<int64_t>(r));
  }
  return rows_E;
}

at::Tensor HeadChunk::TargetSlopes() const {
  const at::Tensor raw_E =
      at::index(logits_RV, {RowsOfEntries(), input.targets_E});
  return 1 - (raw_E / input.softcap).tanh_().square_();
}

const at::Tensor& HeadChunk::SoftmaxBesideTargets(at::Tensor& logprobs_E,
                                                  at::Tensor& entropies_R) {
  input.clear_targets = true;
  const SupportScores supported = supports.Score(logits_RV, input);
  at::Tensor& softmax_RV = weights_RV.defined() ? weights_RV : logits_RV;
  if (weights_RV.defined()) {
    ops::VocabWeights(logits_RV, input, weights_RV, scale_R, logprobs_E,
                      entropies_R);
  } else {
    ops::VocabRows(logits_RV, input, /*softmax_in_place=*/true, logprobs_E,
                   entropies_R);
  }
  supports.PutScores(supported, logprobs_E, entropies_R);
  supports.PutSoftmax(supported, input, softmax_RV, scale_R);
  return softmax_RV;
}

bool TakesWeights(const at::Tensor& weight_VH, const ScoreRows& rows,
                  const HeadOptions& options) {
  const HeadLora lora(rows.routing, HeadComputeType(weight_VH));
  bool trains_head = false;
  for (size_t s = 0; s < rows.routing.size(); ++s) {
    trains_head = trains_head || lora.Trains(s);
  }
  return ops::kHasCudaKernels && weight_VH.is_cuda() &&
         weight_VH.scalar_type() == at::kBFloat16 && !trains_head &&
         rows.filters.empty() && options.shard.group == nullptr;
}

HeadChunks::HeadChunks(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                       const ScoreRows& rows, const HeadOptions& options,
                       size_t buffer)
    : hidden_RH_(hidden_RH),
      weight_VH_(weight_VH),
      rows_(rows),
      device_rows_(Upload(rows, options, weight_VH.device())),
      softcap_(options.softcap),
      lora_(rows.routing, HeadComputeType(weight_VH)),
      chunk_(HeadChunkRows(options, hidden_RH.size(0),
                           LargestVocab(weight_VH, options.shard),
                           weight_VH.is_cpu())),
      buffer_(
          LogitsBuffer(chunk_, weight_VH.size(0),
                       weight_VH.options().dtype(HeadComputeType(weight_VH)),
                       weight_VH.is_cpu() && options.chunk_rows > 0, buffer)) {}

void HeadChunks::TakeWeights(const at::Tensor& scale_R) {
  weights_ = at::empty(buffer_.sizes(), buffer_.options().dtype(at::kBFloat16));
  scale_R_ = scale_R;
}

void HeadChunks::ForEach(int64_t begin, int64_t end,
                         const std::vector<at::Tensor>& shrunk_nR,
                         const std::function<void(HeadChunk&)>& visit) const {
  const int64_t vocab = weight_VH_.size(0);
  for (; begin < end; begin += chunk_) {
    const int64_t count = std::min(chunk_, end - begin);
    const int64_t first = rows_.row_offsets[begin];
    const int64_t num_entries = rows_.row_offsets[begin + count] - first;
    HeadChunk chunk;
    chunk.begin = begin;
    chunk.count = count;
    chunk.first_entry = first;
    chunk.num_entries = num_entries;
    chunk.input.row_offsets =
        device_rows_.row_offsets.narrow(0, begin, count + 1);
    chunk.input.targets_E =
        device_rows_.targets_E.narrow(0, first, num_entries);
    chunk.input.temperature_R =
        device_rows_.temperature_R.narrow(0, begin, count);
    chunk.input.softcap = softcap_;
    chunk.supports = ChunkSupports(rows_, begin, count, weight_VH_.device());
    chunk.logits_RV = buffer_.narrow(0, 0, count * vocab).view({count, vocab});
    if (device_rows_.rows_E.defined()) {
      chunk.all_rows_E = device_rows_.rows_E.narrow(0, first, num_entries);
    }
    if (weights_.defined()) {
      chunk.weights_RV =
          weights_.narrow(0, 0, count * vocab).view({count, vocab});
      chunk.scale_R = scale_R_.narrow(0, begin, count);
    }
    ComputeLogits(hidden_RH_.narrow(0, begin, count), weight_VH_,
                  chunk.logits_RV);
    lora_.AddLogits(shrunk_nR, begin, chunk.logits_RV);
    visit(chunk);
  }
}

OwnEntries EntriesOfShard(const ScoreRows& rows, const VocabShard& shard) {
  const Range range = RangeOf(shard);
  OwnEntries own{.rows = {.row_offsets = {0},
                          .temperatures = rows.temperatures,
                          .filters = rows.filters,
                          .supports = SupportsOfShard(rows.supports,
                                                      range.begin, range.end),
                          .routing = rows.routing}};
  for (size_t r = 0; r < rows.temperatures.size(); ++r) {
    for (int64_t e = rows.row_offsets[r]; e < rows.row_offsets[r + 1]; ++e) {
      if (!Contains(range, rows.targets[e])) continue;
      own.rows.targets.push_back(rows.targets[e] - range.begin);
      own.entries_O.push_back(e);
    }
    own.rows.row_offsets.push_back(
        static_cast<int64_t>(own.rows.targets.size()));
  }
  return own;
}

EntryPlaces PlacesOf(const ScoreRows& rows, const OwnEntries& own,
                     at::Device device) {
  return {.own_O = ops::ToDevice(own.entries_O, device),
          .rows_E = ops::ToDevice(RowsOfEntries(rows), device)};
}

HeadCoefficients CoefficientsOfShard(const HeadCoefficients& coefficients,
                                     const VocabShard& shard) {
  const Range range = RangeOf(shard);
  HeadCoefficients own{.row_offsets = {0}, .rows_R = coefficients.rows_R};
  for (size_t r = 0; r < coefficients.rows_R.size(); ++r) {
    const int64_t end = coefficients.row_offsets[r + 1];
    for (int64_t e = coefficients.row_offsets[r]; e < end; ++e) {
      if (!Contains(range, coefficients.targets[e])) continue;
      own.targets.push_back(coefficients.targets[e] - range.begin);
      own.entries.push_back(coefficients.entries[e]);
    }
    own.row_offsets.push_back(static_cast<int64_t>(own.targets.size()));
  }
  return own;
}

void ScoreChunkOfShard(HeadChunk& chunk, const ScoreRows& rows,
                       const EntryPlaces& places, parallel::Communicator& group,
                       ChunkScores& scores) {
  const int64_t first = rows.row_offsets[chunk.begin];
  const int64_t num_entries =
      rows.row_offsets[chunk.begin + chunk.count] - first;
  const at::Tensor own_O =
      places.own_O.narrow(0, chunk.first_entry, chunk.num_entries) - first;
  const at::Tensor rows_E =
      places.rows_E.narrow(0, first, num_entries) - chunk.begin;
  // Computes the slopes before the softmax overwrites the logits.
  at::Tensor slopes_O;
  if (scores.slopes_E.defined()) slopes_O = chunk.TargetSlopes();
  const LocalScores local = ScoreLocally(chunk, scores.share_R.defined(),
                                         scores.entropies_R.defined());
  if (scores.share_R.defined()) {
    // Sets the softmax at the rows' own targets to 0. ScoreLocally cannot do
    // this, because its targets also include the largest logits.
    at::index_put_(chunk.logits_RV,
                   {chunk.RowsOfEntries(), chunk.input.targets_E},
                   at::zeros({}, chunk.logits_RV.options()));
  }

  std::vector<at::Tensor> told = {
      local.lse_R, AmongAll(local.logprobs_O, own_O, num_entries)};
  if (slopes_O.defined()) {
    told.push_back(AmongAll(slopes_O, own_O, num_entries));
  }
  if (local.entropies_R.defined()) {
    told.push_back(local.entropies_R.to(at::kDouble));
  }
  Merge(group.AllGather(at::cat(told)), chunk.count, rows_E, group.shard().rank,
        scores);
}

}  // namespace weft::loss
