#include "src/startup/weight_error.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "src/base/status_macros.h"
#include "src/loss/logits.h"
#include "src/model/decoder_weights.h"
#include "src/model_config/weight_list.h"

namespace weft::engine {
namespace {

using model::WeightEntry;
using model::WeightSlot;

constexpr int64_t kTextTokens = 64;
constexpr int64_t kHeadSlice = 4096;

// Reads the checkpoint's weights in f32, part by part.
class Parts {
 public:
  Parts(const weights::Checkpoint& checkpoint, const model::Decoder& decoder)
      : checkpoint_(checkpoint),
        config_(decoder.config()),
        device_(decoder.device()),
        entries_(model::ListWeights(config_)) {}

  [[nodiscard]] absl::StatusOr<model::LayerWeights> Layer(int layer) const {
    std::vector<WeightEntry> own;
    for (const WeightEntry& entry : entries_) {
      const bool in_layers = entry.slot != WeightSlot::kEmbedding &&
                             entry.slot != WeightSlot::kFinalNorm &&
                             entry.slot != WeightSlot::kHead;
      if (in_layers && entry.layer == layer) own.push_back(entry);
    }
    WEFT_ASSIGN_OR_RETURN(model::DecoderWeights w, Load(own));
    return std::move(w.layers[layer]);
  }

  [[nodiscard]] absl::StatusOr<at::Tensor> FinalNorm() const {
    WEFT_ASSIGN_OR_RETURN(const model::DecoderWeights w,
                          Load({EntryOf(WeightSlot::kFinalNorm)}));
    return w.final_norm_H;
  }

  // Returns the rows of the embedding for `tokens`, [tokens, hidden].
  [[nodiscard]] absl::StatusOr<at::Tensor> Embeddings(
      const std::vector<int64_t>& tokens) const {
    std::vector<WeightEntry> rows;
    for (const int64_t token : tokens) {
      WeightEntry row = RowsOf(WeightSlot::kEmbedding, token, 1);
      row.first_row = static_cast<int64_t>(rows.size());
      row.slot_rows = static_cast<int64_t>(tokens.size());
      rows.push_back(std::move(row));
    }
    WEFT_ASSIGN_OR_RETURN(const model::DecoderWeights w, Load(rows));
    return w.embedding_VH;
  }

  // Returns the rows [begin, begin + count) of the head, [count, hidden].
  [[nodiscard]] absl::StatusOr<at::Tensor> Head(int64_t begin,
                                                int64_t count) const {
    const bool tied = config_.tied_embeddings;
    WEFT_ASSIGN_OR_RETURN(
        const model::DecoderWeights w,
        Load({RowsOf(tied ? WeightSlot::kEmbedding : WeightSlot::kHead, begin,
                     count)}));
    return w.head_VH;
  }

 private:
  [[nodiscard]] const WeightEntry& EntryOf(WeightSlot slot) const {
    return *std::ranges::find(entries_, slot, &WeightEntry::slot);
  }

  [[nodiscard]] WeightEntry RowsOf(WeightSlot slot, int64_t begin,
                                   int64_t count) const {
    WeightEntry rows = EntryOf(slot);
    rows.part_row = begin;
    rows.part_shape[0] = rows.slot_rows = count;
    return rows;
  }

  [[nodiscard]] absl::StatusOr<model::DecoderWeights> Load(
      const std::vector<WeightEntry>& entries) const {
    return model::LoadEntries(checkpoint_, config_, entries, at::kFloat,
                              device_);
  }

  const weights::Checkpoint& checkpoint_;
  const model::ModelConfig& config_;
  const at::Device device_;
  const std::vector<WeightEntry> entries_;
};

model::PackedBatch BatchOf(const std::vector<int64_t>& tokens,
                           at::Device device) {
  const auto count = static_cast<int64_t>(tokens.size());
  return {.tokens_T = at::tensor(tokens).to(device),
          .positions_T = at::arange(count, at::kInt).to(device),
          .nodes = {
              {.begin = 0, .end = count, .parent = -1, .subtree_end = count}}};
}

// Returns the checkpoint's logits in f32, [T, V], for the T tokens of `text`
// and a vocabulary of V.
absl::StatusOr<at::Tensor> LogitsOfCheckpoint(
    const model::Decoder& decoder, const Parts& parts,
    const std::vector<int64_t>& text) {
  const model::ModelConfig& config = decoder.config();
  model::DecoderWeights small;
  small.layers.resize(config.num_layers);
  WEFT_ASSIGN_OR_RETURN(small.embedding_VH, parts.Embeddings(text));
  WEFT_ASSIGN_OR_RETURN(small.final_norm_H, parts.FinalNorm());
  const at::Tensor x_TH = small.embedding_VH;
  model::Decoder reference(config, std::move(small), kTextTokens);
  WEFT_ASSIGN_OR_RETURN(
      const at::Tensor out_TH,
      reference.ForwardStreamed(
          x_TH, BatchOf(text, decoder.device()),
          [&parts](int layer) { return parts.Layer(layer); }));
  const at::Tensor normed_TH = reference.FinalNorm(out_TH);
  at::Tensor logits_TV = at::empty({kTextTokens, config.vocab});
  for (int64_t v = 0; v < config.vocab; v += kHeadSlice) {
    const int64_t count = std::min(kHeadSlice, config.vocab - v);
    WEFT_ASSIGN_OR_RETURN(const at::Tensor head_VH, parts.Head(v, count));
    logits_TV.narrow(1, v, count)
        .copy_(loss::HeadLogits(normed_TH, head_VH, /*routing=*/{},
                                config.final_softcap));
  }
  return logits_TV;
}

}  // namespace

std::vector<int64_t> FixedText(int64_t vocab) {
  // The fractional parts of the multiples of the golden ratio are spread evenly
  // over [0, 1). kGolden is the ratio's fractional part in units of 2^-64.
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15U;
  std::vector<int64_t> text;
  for (uint64_t i = 1; i <= kTextTokens; ++i) {
    text.push_back(static_cast<int64_t>(
        (i * kGolden >> 32) * static_cast<uint64_t>(vocab) >> 32));
  }
  return text;
}

absl::StatusOr<WeightError> CompareWithCheckpoint(
    const model::Decoder& decoder, const weights::Checkpoint& checkpoint) {
  const at::InferenceMode no_autograd;
  const std::vector<int64_t> text = FixedText(decoder.config().vocab);
  const at::Tensor x_TH = decoder.ForwardLayers(
      model::Mode::kEval, BatchOf(text, decoder.device()), /*tape=*/nullptr,
      /*num_recomputed=*/0, /*kv=*/nullptr);
  const at::Tensor logits_TV =
      loss::HeadLogits(decoder.FinalNorm(x_TH), decoder.weights().head_VH,
                       /*routing=*/{}, decoder.config().final_softcap)
          .cpu();
  WEFT_ASSIGN_OR_RETURN(
      const at::Tensor exact_TV,
      LogitsOfCheckpoint(decoder, Parts(checkpoint, decoder), text));
  WeightError error{.num_tokens = kTextTokens};
  for (int64_t t = 0; t < kTextTokens; ++t) {
    const at::Tensor p = at::log_softmax(exact_TV[t].to(at::kDouble), 0);
    const at::Tensor q = at::log_softmax(logits_TV[t].to(at::kDouble), 0);
    error.mean_kl += (p.exp() * (p - q)).sum().item<double>() / kTextTokens;
    const bool same = p.argmax().item<int64_t>() == q.argmax().item<int64_t>();
    error.top1 += same ? 1.0 / kTextTokens : 0;
  }
  return error;
}

}  // namespace weft::engine
