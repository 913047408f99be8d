#include "src/engine/sample_sequences.h"

#include <algorithm>
#include <ranges>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::engine {
namespace {

int64_t SequenceTokens(const SampleRequest& request) {
  // The model does not read the last drawn token, so the cache has no slot for
  // the token.
  return static_cast<int64_t>(request.prompt.size()) +
         request.config.max_tokens - 1;
}

}  // namespace

SampleSequences::SampleSequences(executor::Executor* executor,
                                 int64_t kv_cache_bytes, EngineProbe* probe)
    : executor_(*executor),
      probe_(probe),
      pool_(
          executor::PageBytes(executor->decoder(), kPageTokens), kv_cache_bytes,
          [executor](const kv::PageCopy& copy) { executor->CopyPage(copy); }) {
  executor->MakeCache(pool_.num_pages(), kPageTokens);
}

absl::Status SampleSequences::CheckFits(const SampleRequest& request) const {
  // Several samples share the prompt's full pages. A copy of the partly filled
  // page needs one page more.
  const int64_t needed = KvPool::PagesFor(SequenceTokens(request)) +
                         (request.num_samples > 1 ? 1 : 0);
  if (needed <= pool_.num_pages()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "prompt and config.max_tokens need ", needed * pool_.bytes_per_page(),
      " bytes of key/value cache, there are ",
      pool_.num_pages() * pool_.bytes_per_page(), " (--kv-cache-bytes)"));
}

bool SampleSequences::HasRoom(const SampleRequest& request,
                              int max_sequences) const {
  // Counts the pages that this prompt and waiting sequences need, and one more
  // page for each sequence that has pages.
  int64_t promised =
      KvPool::PagesFor(static_cast<int64_t>(request.prompt.size()));
  int num_sequences = 0;
  for (const auto& [age, sequence] : sequences_) {
    promised +=
        sequence.pages.has_value() ? 1 : KvPool::PagesFor(sequence.target());
    if (sequence.sample_index != kPrompt || !sequence.ready()) ++num_sequences;
  }
  return num_sequences < max_sequences && promised <= pool_.available_pages();
}

void SampleSequences::Add(SampleSequence sequence) {
  const SampleJob& job = *sequence.job;
  if (job.version != nullptr) versions_[job.weights_id()] = job.version;
  sequences_.emplace(sequence.age(), std::move(sequence));
}

void SampleSequences::EraseAllOf(const SampleJob& job) {
  std::erase_if(sequences_, [&](const auto& sequence) {
    return sequence.second.job == &job;
  });
}

bool SampleSequences::TakePages(SampleSequence& sequence) {
  const SampleJob& job = *sequence.job;
  const int64_t target = sequence.target();
  // Keys and values are cached, but hidden states are not. So prefill must
  // compute the rows that still need scores, and the last row of a prompt, from
  // which the samples draw their first tokens.
  int64_t reusable = target;
  if (sequence.sample_index == kPrompt && job.first_draws.empty()) {
    reusable = (job.scores_prompt() ? job.num_scored() : target) - 1;
  }
  kv::SequencePages pages =
      pool_.Begin(job.weights_id(), sequence.Tokens(reusable));
  const int64_t found = pages.num_tokens();
  if (!MakeRoom(KvPool::PagesFor(target - found), sequence.age()) ||
      !pool_.Append(pages, target - found)) {
    return false;
  }
  sequence.pages = std::move(pages);
  sequence.length = found;
  probe_->CountPrefixLookup(target, found);
  return true;
}

std::optional<kv::SequencePages> SampleSequences::Fork(
    const SampleSequence& prompt) {
  // The new page is for a copy of a partly filled page, or for the next token.
  if (!MakeRoom(1, prompt.age())) return std::nullopt;
  return pool_.Fork(*prompt.pages);
}

bool SampleSequences::MakeRoom(int64_t count, SampleAge age) {
  int64_t num_running = 0;
  bool moves = false;
  for (const auto& [key, sequence] : sequences_) {
    if (!sequence.pages.has_value()) continue;
    if (sequence.sample_index != kPrompt) ++num_running;
    moves |= sequence.sample_index != kPrompt || !sequence.ready();
  }
  if (count + num_running <= pool_.available_pages()) return true;
  if (moves) return false;
  while (count > pool_.available_pages()) {
    SampleSequence* youngest = Youngest();
    if (youngest == nullptr || youngest->age() <= age) return false;
    Preempt(*youngest);
  }
  return true;
}

std::vector<SampleSequence*> SampleSequences::GrowRunning() {
  std::vector<SampleSequence*> running;
  for (auto& entry : sequences_) {
    SampleSequence& sequence = entry.second;
    if (sequence.sample_index == kPrompt || !sequence.ready()) continue;
    const auto has_place = [&] {
      return sequence.pages->num_tokens() > sequence.length ||
             pool_.Append(*sequence.pages, 1);
    };
    while (sequence.pages.has_value() && !has_place()) {
      Preempt(*Youngest());  // The youngest may be this sequence itself.
    }
    if (sequence.pages.has_value()) running.push_back(&sequence);
  }
  return running;
}

SampleSequence* SampleSequences::Youngest() {
  for (auto& [age, sequence] : std::views::reverse(sequences_)) {
    if (sequence.pages.has_value()) return &sequence;
  }
  return nullptr;
}

at::Tensor SampleSequences::ExpertsOf(const SampleSequence& sequence) const {
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < sequence.length; ++i) {
    slots.push_back(sequence.pages->Slot(i));
  }
  return executor_.ReadExperts(slots);
}

void SampleSequences::Preempt(SampleSequence& sequence) {
  // An earlier preemption may have stored the experts of all the sequence's
  // computed tokens. Then the experts are not read again.
  if (sequence.job->request->return_routing &&
      (!sequence.experts_NE.defined() ||
       sequence.experts_NE.size(0) < sequence.length)) {
    sequence.experts_NE = ExpertsOf(sequence);
  }
  CachePrefix(sequence);
  sequence.pages.reset();
  sequence.length = 0;
  probe_->CountPreemption();
}

void SampleSequences::CachePrefix(SampleSequence& sequence) {
  pool_.CachePrefix(sequence.job->weights_id(),
                    sequence.Tokens(sequence.length), *sequence.pages);
}

void SampleSequences::ForgetDeadVersions() {
  std::erase_if(versions_, [this](const auto& version) {
    const bool dead = version.second.expired();
    if (dead) pool_.Forget(version.first);
    return dead;
  });
}

void SampleSequences::ReportPages() {
  const int64_t page = pool_.bytes_per_page();
  probe_->SetKvBytes((pool_.num_pages() - pool_.available_pages()) * page,
                     pool_.prefix_pages() * page, pool_.num_pages() * page);
}

}  // namespace weft::engine
