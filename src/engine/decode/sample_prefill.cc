#include "src/engine/decode/sample_prefill.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/types/span.h"
#include "src/base/clock.h"
#include "src/base/observe/profile.h"
#include "src/engine/decode/sample_routing.h"

namespace weft::engine {
namespace {

// A piece gathers the keys of all tokens up to its end. So the last pieces of
// many long prompts in one pass could exhaust the memory. A pass that may
// compute N tokens therefore gathers at most N * kMaxKeysPerToken keys in each
// layer. If the first piece alone exceeds this limit, the pass has no other
// piece.
constexpr int64_t kMaxKeysPerToken = 8;

// Makes the CachePlan of one pass, row by row.
class PrefillRows {
 public:
  // Adds tokens [begin, end) of a sequence.
  void Add(const SampleSequence& sequence, int64_t begin, int64_t end);
  // Scores `own`, if there is one, and the tokens `targets` after a row.
  void Score(int64_t row, std::optional<int32_t> own,
             absl::Span<const int32_t> targets,
             const lora::AdapterVersionPtr& version);
  // Asks for the logits of a row. Returns the row's index in the logits.
  int64_t WantLogits(int64_t row, const lora::AdapterVersionPtr& version);
  void Draw(const sampling::DrawRule& rule) { plan_.draws.push_back(rule); }
  // Changes a row of the logits as the sequence asks.
  void Edit(SampleSequence& sequence, int64_t logit) {
    sequence.AddEdits(logit, plan_.edits);
  }

  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
  executor::CachePlan Plan() &&;

 private:
  std::vector<int64_t> tokens_;
  std::vector<int32_t> positions_;
  std::vector<int64_t> slots_;
  std::vector<int64_t> key_slots_;
  std::vector<int64_t> states_;
  std::vector<ops::SuffixRows> suffixes_;
  bool has_past_ = false;
  // For each preempted sequence: its first row in the pass, and the experts
  // that computed its tokens before the preemption.
  std::vector<std::pair<int64_t, at::Tensor>> given_;
  executor::CachePlan plan_{.scores = {.row_offsets = {0}}};
};

void PrefillRows::Add(const SampleSequence& sequence, int64_t begin,
                      int64_t end) {
  const std::vector<int32_t> tokens_so_far = sequence.Tokens(end);
  const dispatch::SequencePages& pages = *sequence.pages;
  const int64_t row = this->size();
  const int64_t end_row = row + end - begin;
  suffixes_.push_back({.q_begin = row,
                       .q_size = end - begin,
                       .k_begin = static_cast<int64_t>(key_slots_.size()),
                       .k_size = end});
  for (int64_t i = 0; i < end; ++i) key_slots_.push_back(pages.Slot(i));
  slots_.insert(slots_.end(), key_slots_.end() - (end - begin),
                key_slots_.end());
  if (const auto& state = pages.state().id()) states_.push_back(*state);
  for (int64_t i = begin; i < end; ++i) {
    tokens_.push_back(tokens_so_far[i]);
    positions_.push_back(static_cast<int32_t>(i));
  }
  has_past_ |= begin > 0;
  plan_.batch.nodes.push_back(
      {.begin = row, .end = end_row, .subtree_end = end_row});
  AddRows(plan_.batch.routing, sequence.version, row, end_row);
  if (sequence.experts_NE.defined()) {
    const int64_t known = std::min(end, sequence.experts_NE.size(0));
    if (begin < known) {
      given_.emplace_back(row,
                          sequence.experts_NE.narrow(0, begin, known - begin));
    }
  }
}

void PrefillRows::Score(int64_t row, std::optional<int32_t> own,
                        absl::Span<const int32_t> targets,
                        const lora::AdapterVersionPtr& version) {
  if (!own.has_value() && targets.empty()) return;
  loss::ScoreRows& scores = plan_.scores;
  const auto scored = static_cast<int64_t>(plan_.score_rows.size());
  AddRows(scores.routing, version, scored, scored + 1);
  plan_.score_rows.push_back(row);
  if (own.has_value()) scores.targets.push_back(*own);
  scores.targets.insert(scores.targets.end(), targets.begin(), targets.end());
  scores.row_offsets.push_back(static_cast<int64_t>(scores.targets.size()));
  scores.temperatures.push_back(1.0f);
}

int64_t PrefillRows::WantLogits(int64_t row,
                                const lora::AdapterVersionPtr& version) {
  const auto logit = static_cast<int64_t>(plan_.logit_rows.size());
  AddRows(plan_.logit_routing, version, logit, logit + 1);
  plan_.logit_rows.push_back(row);
  return logit;
}

executor::CachePlan PrefillRows::Plan() && {
  plan_.batch.tokens_T = at::tensor(tokens_, at::kLong);
  plan_.batch.positions_T = at::tensor(positions_, at::kInt);
  plan_.kv.slots_T = at::tensor(slots_, at::kLong);
  if (!states_.empty()) {
    plan_.kv.state_slots_Q = at::tensor(states_, at::kLong);
  }
  for (const auto& [row, experts_NE] : given_) {
    at::Tensor& experts_TE = plan_.batch.experts_TE;
    if (!experts_TE.defined()) {
      experts_TE =
          at::full({size(), experts_NE.size(1)}, -1, experts_NE.options());
    }
    experts_TE.narrow(0, row, experts_NE.size(0)).copy_(experts_NE);
  }
  if (has_past_) {
    plan_.kv.suffixes = std::move(suffixes_);
    plan_.kv.key_slots_S = at::tensor(key_slots_, at::kLong);
  }
  return std::move(plan_);
}

// The draws of prompt_alternatives use the random numbers of sample indices
// from here on, which no sample has.
constexpr uint32_t kFirstAlternative = uint32_t{1} << 31;

// Positions [begin, end) of a prompt, which a piece scores. The row of token i
// scores position i + 1.
struct Positions {
  int64_t begin = 0;
  int64_t end = 0;
};

Positions UnscoredPrompt(const SamplePiece& piece) {
  const SampleJob& job = *piece.sequence->job;
  // If the prompt was preempted, some positions already have their scores.
  return {.begin = std::max(piece.begin + 1, job.num_scored),
          .end = std::min(piece.end + 1,
                          static_cast<int64_t>(job.request->prompt.size()))};
}

// So many prompt_targets take as long as a token of a prompt.
constexpr int64_t kTargetsPerToken = 64;

// Returns how many tokens without prompt_targets take as long as the piece
// without its draws.
int64_t CostOf(const SamplePiece& piece) {
  const int64_t tokens = piece.end - piece.begin;
  const std::vector<int64_t>& offsets =
      piece.sequence->job->request->prompt_target_offsets;
  const Positions scored = UnscoredPrompt(piece);
  if (offsets.empty() || scored.begin >= scored.end) return tokens;
  return std::max(
      tokens,
      (offsets[scored.end - 1] - offsets[scored.begin - 1]) / kTargetsPerToken);
}

// Returns the size of the sequence's next piece if it costs at most `budget`;
// 0 if all tokens are cached. A single token may cost more.
int64_t SizeWithin(int64_t budget, SampleSequence& sequence) {
  const int64_t most = std::min(budget, sequence.target() - sequence.length);
  SamplePiece piece = {.sequence = &sequence,
                       .begin = sequence.length,
                       .end = sequence.length + most};
  while (piece.end - piece.begin > 1 && CostOf(piece) > budget) --piece.end;
  return piece.end - piece.begin;
}

// What a request wants of one position of its prompt.
struct PositionWants {
  bool logprob = false;
  absl::Span<const int32_t> targets;
  int top = 0;
  int alternatives = 0;
};

PositionWants WantsOf(const SampleRequest& request, int64_t position) {
  const bool in_last_n = position >= request.first_of_last_n();
  PositionWants wants{.logprob = request.prompt_logprobs && in_last_n,
                      .top = in_last_n ? request.prompt_top_logprobs : 0,
                      .alternatives = request.prompt_alternatives};
  const std::vector<int64_t>& offsets = request.prompt_target_offsets;
  if (!offsets.empty()) {
    const int64_t begin = offsets[position - 1];
    wants.targets = absl::MakeConstSpan(request.prompt_targets)
                        .subspan(begin, offsets[position] - begin);
  }
  return wants;
}

// Adds what the job wants of a position of its prompt, which `row` predicts.
void AddPosition(const SampleJob& job, int64_t position, int64_t row,
                 const lora::AdapterVersionPtr& version, PrefillRows& rows) {
  const SampleRequest& request = *job.request;
  const PositionWants wants = WantsOf(request, position);
  std::optional<int32_t> own;
  if (wants.logprob) own = request.prompt[position];
  rows.Score(row, own, wants.targets, version);
  if (wants.top == 0 && wants.alternatives == 0) return;
  const auto logit = static_cast<int32_t>(rows.WantLogits(row, version));
  if (wants.top > 0) {
    rows.Draw({.config = {.temperature = 0, .top_logprobs = wants.top},
               .row = logit});
  }
  for (int i = 0; i < wants.alternatives; ++i) {
    rows.Draw({.config = {.temperature = request.config.temperature},
               .seed = request.config.seed,
               .sample_index = kFirstAlternative + static_cast<uint32_t>(i),
               .position = static_cast<uint32_t>(position),
               .row = logit});
  }
}

// Where the results of a pass that are not stored yet begin.
struct PassOutput {
  const float* score = nullptr;
  std::vector<std::optional<sampling::DrawResult>>::iterator drawn;
};

// Adds the likeliest tokens at a position, where the prompt has `token`.
void AddTop(SampleJob& job, int32_t token, bool has_logprob,
            std::optional<sampling::DrawResult> drawn) {
  job.failed |= !drawn.has_value();
  TopLogprobs& row = job.result.prompt_top_logprobs.emplace_back();
  if (drawn.has_value()) row = std::move(drawn->top_logprobs);
  if (!has_logprob) return;
  // Clients compare prompt_logprobs with this list to see whether `token` is
  // the likeliest. On CUDA the two come from different matrix products and
  // round differently, so the list gets `token`'s value from prompt_logprobs.
  for (auto& [id, logprob] : row) {
    if (id == token) logprob = job.result.prompt_logprobs.back();
  }
}

// Stores what AddPosition has asked for.
void StorePosition(SampleJob& job, int64_t position, PassOutput& output) {
  const PositionWants wants = WantsOf(*job.request, position);
  SampleResult& result = job.result;
  if (wants.logprob) result.prompt_logprobs.push_back(*output.score++);
  const float* const end = output.score + wants.targets.size();
  result.prompt_target_logprobs.insert(result.prompt_target_logprobs.end(),
                                       std::exchange(output.score, end), end);
  if (wants.top > 0) {
    AddTop(job, job.request->prompt[position], wants.logprob,
           std::move(*output.drawn++));
  }
  if (wants.alternatives > 0) {
    TopLogprobs& row = result.prompt_alternatives.emplace_back();
    for (int i = 0; i < wants.alternatives; ++i) {
      const std::optional<sampling::DrawResult>& drawn = *output.drawn++;
      job.failed |= !drawn.has_value();
      if (drawn.has_value()) row.emplace_back(drawn->token, drawn->logprob);
    }
  }
  job.num_scored = position + 1;
}

}  // namespace

bool SamplePiece::ends_prompt() const {
  return sequence->sample_index == kPrompt &&
         sequence->job->first_draws.empty() && end == sequence->target();
}

void SamplePrefill::Run() {
  const absl::Time start = SteadyNow();
  const std::vector<SamplePiece> pieces = Plan();
  if (pieces.empty()) return;
  const profile::Span span("prefill", "prompts",
                           static_cast<int64_t>(pieces.size()));
  RunPieces(pieces);
  int64_t num_tokens = 0;
  for (const SamplePiece& piece : pieces) num_tokens += piece.end - piece.begin;
  probe_->ObservePrefill(num_tokens, SteadyNow() - start);
}

std::vector<SampleSequence*> SamplePrefill::InTurn() {
  std::vector<SampleSequence*> waiting = sequences_.InOrder();
  std::erase_if(waiting, [](const SampleSequence* s) {
    return s->ready() || (s->sample_index != kPrompt && !s->has_slot);
  });
  std::set<AdapterKey> flows;
  for (const SampleSequence* sequence : waiting) {
    flows.insert(sequence->job->flow);
    shares_.Add(sequence->job->flow, sequence->job->tenant);
    shares_.SetActive(sequence->job->flow, true);
  }
  for (const AdapterKey flow : flows_) {
    if (!flows.contains(flow)) shares_.Remove(flow);
  }
  flows_ = std::move(flows);
  std::ranges::sort(waiting, {}, [this](const SampleSequence* s) {
    return std::pair(shares_.TurnOf(s->job->flow), s->age());
  });
  return waiting;
}

int64_t SamplePrefill::ShareOf(const SamplePiece& piece) const {
  const int64_t others = std::max(piece.num_draws * max_tokens_ / max_draws_,
                                  piece.end / kMaxKeysPerToken);
  return std::max(CostOf(piece), std::min(others, max_tokens_));
}

std::optional<SamplePiece> SamplePrefill::NextPiece(SampleSequence& sequence,
                                                    int64_t budget,
                                                    int64_t draw_budget) const {
  int64_t num_draws = 0;
  int64_t size = SizeWithin(budget, sequence);
  if (size == 0) return std::nullopt;  // All tokens are cached.
  size =
      sequences_.EndOfPiece(sequence, sequence.length + size) - sequence.length;
  const int64_t unlisted = sequence.first_listed() - sequence.length;
  if (size > unlisted) {
    // A row that needs logits counts as a draw, and each draw of it, too.
    const int64_t draws =
        std::max<int64_t>(1, sequence.job->request->prompt_alternatives);
    const int64_t free = std::max<int64_t>(unlisted, 0);
    const int64_t listed =
        draw_budget <= 0 ? 0 : std::max<int64_t>(1, draw_budget / draws);
    size = std::min(size, free + listed);
    if (size == 0) return std::nullopt;
    num_draws = (size - free) * draws;
  }
  SamplePiece piece = {.sequence = &sequence,
                       .begin = sequence.length,
                       .end = sequence.length + size,
                       .num_draws = num_draws};
  if (piece.ends_prompt()) {
    piece.num_draws += sequence.job->request->num_samples;
  }
  return piece;
}

std::vector<SamplePiece> SamplePrefill::Plan() {
  std::vector<SamplePiece> pieces;
  int64_t budget = max_tokens_;
  int64_t key_budget = kMaxKeysPerToken * budget;
  // The piece that ends a prompt also draws the first token of each of the
  // prompt's samples.
  int64_t draw_budget = max_draws_;
  // The first sequence, in the order of pages, that must wait for pages.
  const SampleSequence* short_of_pages = nullptr;
  std::set<std::string> passed;  // Tenants whose next piece is too large.
  for (SampleSequence* const next : InTurn()) {
    SampleSequence& sequence = *next;
    if (budget <= 0) break;
    if (passed.contains(sequence.job->tenant)) continue;
    if (!sequence.pages.has_value()) {
      // Otherwise small sequences could take the pages that a large sequence
      // before them waits for.
      if (short_of_pages != nullptr && short_of_pages->place < sequence.place) {
        continue;
      }
      if (!sequences_.TakePages(sequence)) {
        short_of_pages = &sequence;
        continue;
      }
    }
    const std::optional<SamplePiece> piece =
        NextPiece(sequence, budget, draw_budget);
    if (!piece && draw_budget > 0) continue;  // All its tokens are cached.
    // A piece that is too large does not stop those of other tenants. But its
    // own tenant would pay for smaller ones, and never be the first with it.
    const bool fits =
        piece.has_value() && piece->end <= key_budget &&
        CostOf(*piece) <= budget &&
        (!piece->ends_prompt() || piece->num_draws <= draw_budget);
    if (!fits && (!piece || !pieces.empty())) {
      passed.insert(sequence.job->tenant);
      continue;
    }
    pieces.push_back(*piece);
    key_budget -= piece->end;
    draw_budget -= piece->num_draws;
    budget -= CostOf(*piece);
  }
  // A sequence that took pages may have preempted another one.
  std::erase_if(pieces, [](const SamplePiece& piece) {
    return !piece.sequence->pages.has_value();
  });
  for (const SamplePiece& piece : pieces) {
    shares_.Charge(piece.sequence->job->flow, ShareOf(piece));
  }
  return pieces;
}

void SamplePrefill::RunPieces(const std::vector<SamplePiece>& pieces) {
  PrefillRows rows;
  for (const SamplePiece& piece : pieces) {
    SampleJob& job = *piece.sequence->job;
    const lora::AdapterVersionPtr& version = piece.sequence->version;
    const int64_t first_row = rows.size();
    rows.Add(*piece.sequence, piece.begin, piece.end);
    const Positions unscored = UnscoredPrompt(piece);
    for (int64_t i = unscored.begin; i < unscored.end; ++i) {
      AddPosition(job, i, first_row + i - 1 - piece.begin, version, rows);
    }
    if (!piece.ends_prompt()) continue;
    const int64_t logit = rows.WantLogits(rows.size() - 1, version);
    const model::Decoder& decoder = executor_.decoder();
    job.MakeEdits(decoder.config().vocab, decoder.device());
    rows.Edit(*piece.sequence, logit);
    for (int i = 0; i < job.request->num_samples; ++i) {
      rows.Draw(job.RuleOf(i, logit));
    }
  }
  Store(pieces, executor_.Run(std::move(rows).Plan()));
}

void SamplePrefill::Store(const std::vector<SamplePiece>& pieces,
                          executor::CacheOutput output) {
  PassOutput next{.score = output.logprobs_E.defined()
                               ? output.logprobs_E.const_data_ptr<float>()
                               : nullptr,
                  .drawn = output.drawn.begin()};
  for (const SamplePiece& piece : pieces) {
    SampleSequence& sequence = *piece.sequence;
    SampleJob& job = *sequence.job;
    const Positions unscored = UnscoredPrompt(piece);
    for (int64_t i = unscored.begin; i < unscored.end; ++i) {
      StorePosition(job, i, next);
    }
    if (piece.ends_prompt()) {
      const auto end = next.drawn + job.request->num_samples;
      job.first_draws.assign(
          std::make_move_iterator(std::exchange(next.drawn, end)),
          std::make_move_iterator(end));
    }
    sequence.length = piece.end;
    sequences_.CachePrefix(sequence, /*ends=*/false);
  }
}

}  // namespace weft::engine
