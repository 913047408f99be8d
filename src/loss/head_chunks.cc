#include "src/loss/head_chunks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "src/loss/head_products.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"

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
// much as the softmax. A GPU's allocator caches memory itself.
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
  if (weights_RV.defined()) {
    ops::VocabWeights(logits_RV, input, weights_RV, scale_R, logprobs_E,
                      entropies_R);
    return weights_RV;
  }
  ops::VocabRows(logits_RV, input, /*softmax_in_place=*/true, logprobs_E,
                 entropies_R);
  return logits_RV;
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
                       const ScoreRows& rows, const HeadOptions& options)
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
                       weight_VH.is_cpu() && options.chunk_rows > 0)) {}

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

}  // namespace weft::loss
