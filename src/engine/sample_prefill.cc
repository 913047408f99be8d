// Prefill of the sampling loop: prompts that are new and sequences that were
// preempted, in pieces.
#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "src/engine/sample_loop.h"
#include "src/engine/sample_routing.h"
#include "src/loss/fused_head.h"
#include "src/loss/logits.h"

namespace weft::engine {
namespace {

// Keys that one pass gathers in each layer, in units of the tokens that it may
// compute: many short rests of long prompts must not take all memory.
constexpr int64_t kMaxKeysPerToken = 8;

// The rows of one pass, as the decoder wants them.
struct PrefillBatch {
  std::vector<int64_t> tokens;
  std::vector<int32_t> positions;
  std::vector<int64_t> slots;
  std::vector<int64_t> key_slots;
  std::vector<ops::SuffixRows> suffixes;
  bool has_past = false;
  model::PackedBatch batch;

  // Tokens [begin, tokens_so_far.size()) of a sequence with these pages.
  void Add(const std::vector<int32_t>& tokens_so_far, int64_t begin,
           const kv::SequencePages& pages,
           const lora::AdapterVersionPtr& version);
  [[nodiscard]] at::Tensor Run(const model::Decoder& decoder,
                               model::KvStore* store);
};

void PrefillBatch::Add(const std::vector<int32_t>& tokens_so_far, int64_t begin,
                       const kv::SequencePages& pages,
                       const lora::AdapterVersionPtr& version) {
  const auto size = static_cast<int64_t>(tokens_so_far.size());
  const auto row = static_cast<int64_t>(tokens.size());
  const int64_t end_row = row + size - begin;
  suffixes.push_back({.q_begin = row,
                      .q_size = size - begin,
                      .k_begin = static_cast<int64_t>(key_slots.size()),
                      .k_size = size});
  for (int64_t i = 0; i < size; ++i) key_slots.push_back(pages.Slot(i));
  slots.insert(slots.end(), key_slots.end() - (size - begin), key_slots.end());
  for (int64_t i = begin; i < size; ++i) {
    tokens.push_back(tokens_so_far[i]);
    positions.push_back(static_cast<int32_t>(i));
  }
  has_past |= begin > 0;
  batch.nodes.push_back({.begin = row, .end = end_row, .subtree_end = end_row});
  AddRows(batch.routing, version, row, end_row);
}

at::Tensor PrefillBatch::Run(const model::Decoder& decoder,
                             model::KvStore* store) {
  const at::Device device = decoder.device();
  batch.tokens_T = at::tensor(tokens, at::kLong).to(device);
  batch.positions_T = at::tensor(positions, at::kInt).to(device);
  model::KvAccess kv{.store = store,
                     .slots_T = at::tensor(slots, at::kLong).to(device)};
  if (has_past) {
    kv.suffixes = std::move(suffixes);
    kv.key_slots_S = at::tensor(key_slots, at::kLong).to(device);
  }
  return decoder.ForwardLayers(model::Mode::kEval, batch, /*tape=*/nullptr,
                               /*num_recomputed=*/0, &kv);
}

}  // namespace

bool SampleLoop::Piece::ends_prompt() const {
  return sequence->sample_index == kPrompt &&
         sequence->job->first_logits.empty() && end == sequence->target();
}

void SampleLoop::Prefill() {
  const absl::Time start = absl::Now();
  const std::vector<Piece> pieces = PlanPrefill();
  if (pieces.empty()) return;
  RunPieces(pieces);
  int64_t num_tokens = 0;
  for (const Piece& piece : pieces) num_tokens += piece.end - piece.begin;
  probe_->ObservePrefill(num_tokens, absl::Now() - start);
}

std::vector<SampleLoop::Piece> SampleLoop::PlanPrefill() {
  std::vector<Piece> pieces;
  int64_t budget = options_.max_prefill_tokens;
  int64_t key_budget = kMaxKeysPerToken * budget;
  for (auto& [age, sequence] : sequences_) {
    if (budget == 0) break;
    if (sequence.ready()) continue;
    // In line: a small one must not keep taking the pages that a large one
    // before it waits for. So whoever is younger than one that waits has none,
    // and nothing that was begun stands still here.
    if (!sequence.pages.has_value() && !TakePages(sequence)) break;
    const int64_t size = std::min(budget, sequence.target() - sequence.length);
    if (size == 0) continue;  // The cache had all of it.
    key_budget -= sequence.length + size;
    if (key_budget < 0 && !pieces.empty()) break;
    pieces.push_back({.sequence = &sequence,
                      .begin = sequence.length,
                      .end = sequence.length + size});
    budget -= size;
  }
  return pieces;
}

bool SampleLoop::TakePages(Sequence& sequence) {
  const Job& job = *sequence.job;
  const int64_t target = sequence.target();
  // Hidden states are not remembered: rows that are still to be scored, the
  // last one of a prompt at least, are computed.
  int64_t reusable = target;
  if (sequence.sample_index == kPrompt && job.first_logits.empty()) {
    reusable = job.request->prompt_logprobs
                   ? static_cast<int64_t>(job.result.prompt_logprobs.size()) - 1
                   : target - 1;
  }
  kv::SequencePages pages =
      pool_.Begin(job.weights_id(), sequence.Tokens(reusable));
  const int64_t found = pages.num_tokens();
  if (!MakeRoom(KvPool::PagesFor(target - found), AgeOf(sequence)) ||
      !pool_.Append(pages, target - found)) {
    return false;
  }
  sequence.pages = std::move(pages);
  sequence.length = found;
  probe_->CountPrefixLookup(target, found);
  return true;
}

void SampleLoop::RunPieces(const std::vector<Piece>& pieces) {
  PrefillBatch batch;
  for (const Piece& piece : pieces) {
    batch.Add(piece.sequence->Tokens(piece.end), piece.begin,
              *piece.sequence->pages, piece.sequence->job->version);
  }
  const at::Tensor x_TH = batch.Run(decoder_, &pool_.store());
  int64_t row = 0;
  for (const Piece& piece : pieces) {
    const int64_t size = piece.end - piece.begin;
    ReadPromptLogprobs(piece, x_TH.narrow(0, row, size));
    row += size;
  }
  ReadFirstLogits(pieces, x_TH);
  for (const Piece& piece : pieces) {
    piece.sequence->length = piece.end;
    Remember(*piece.sequence);
  }
}

void SampleLoop::ReadPromptLogprobs(const Piece& piece,
                                    const at::Tensor& x_TH) {
  Job& job = *piece.sequence->job;
  std::vector<float>& logprobs = job.result.prompt_logprobs;
  const std::vector<int32_t>& prompt = job.request->prompt;
  // Row i scores token i + 1; a prompt that was preempted has some already.
  const int64_t begin =
      std::max(piece.begin, static_cast<int64_t>(logprobs.size()) - 1);
  const int64_t end =
      std::min(piece.end, static_cast<int64_t>(prompt.size()) - 1);
  if (!job.request->prompt_logprobs || begin >= end) return;
  loss::ScoreRows rows;
  rows.row_offsets.push_back(0);
  for (int64_t i = begin; i < end; ++i) {
    rows.targets.push_back(prompt[i + 1]);
    rows.row_offsets.push_back(i + 1 - begin);
    rows.temperatures.push_back(1.0f);
  }
  AddRows(rows.routing, job.version, 0, end - begin);
  const at::Tensor x_RH = x_TH.narrow(0, begin - piece.begin, end - begin);
  const loss::HeadResult scores =
      loss::ScoreHead(decoder_.FinalNorm(x_RH), decoder_.weights().head_VH,
                      rows, {.softcap = decoder_.config().final_softcap},
                      /*want_gradient=*/false, /*want_entropy=*/false);
  const at::Tensor scores_E = scores.logprobs_E.to(at::kCPU);
  const float* data = scores_E.const_data_ptr<float>();
  logprobs.insert(logprobs.end(), data, data + (end - begin));
}

void SampleLoop::ReadFirstLogits(const std::vector<Piece>& pieces,
                                 const at::Tensor& x_TH) {
  std::vector<int64_t> last_rows;
  lora::LoraRouting routing;
  int64_t row = 0;
  for (const Piece& piece : pieces) {
    row += piece.end - piece.begin;
    if (!piece.ends_prompt()) continue;
    const auto last = static_cast<int64_t>(last_rows.size());
    AddRows(routing, piece.sequence->job->version, last, last + 1);
    last_rows.push_back(row - 1);
  }
  if (last_rows.empty()) return;
  const at::Tensor last_RH =
      x_TH.index_select(0, at::tensor(last_rows, at::kLong).to(x_TH.device()));
  const at::Tensor logits_RV =
      loss::HeadLogits(decoder_.FinalNorm(last_RH), decoder_.weights().head_VH,
                       routing, decoder_.config().final_softcap);
  const float* data = logits_RV.const_data_ptr<float>();
  for (const Piece& piece : pieces) {
    if (!piece.ends_prompt()) continue;
    piece.sequence->job->first_logits.assign(data, data + logits_RV.size(1));
    data += logits_RV.size(1);
  }
}

}  // namespace weft::engine
