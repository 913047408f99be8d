// Decides which sequences of the sampling loop hold pages.
#include <algorithm>
#include <ranges>

#include "absl/strings/str_cat.h"
#include "src/decode/sample_loop.h"

namespace weft::engine {

int64_t SampleSequence::target() const {
  const auto prompt = static_cast<int64_t>(job->request->prompt.size());
  if (sample_index == kPrompt) return prompt;
  const Sample& sample = job->result.samples[sample_index];
  return prompt + static_cast<int64_t>(sample.tokens.size()) - 1;
}

std::vector<int32_t> SampleSequence::Tokens(int64_t count) const {
  const std::vector<int32_t>& prompt = job->request->prompt;
  const auto from_prompt = std::min(count, static_cast<int64_t>(prompt.size()));
  std::vector<int32_t> tokens(prompt.begin(), prompt.begin() + from_prompt);
  if (count > from_prompt) {
    const std::vector<int32_t>& drawn =
        job->result.samples[sample_index].tokens;
    tokens.insert(tokens.end(), drawn.begin(),
                  drawn.begin() + (count - from_prompt));
  }
  return tokens;
}

int64_t SampleLoop::SequenceTokens(const SampleRequest& request) const {
  // The last drawn token is never fed back, so it needs no slot.
  return static_cast<int64_t>(request.prompt.size()) +
         request.config.max_tokens - 1;
}

absl::Status SampleLoop::CheckFits(const SampleRequest& request) const {
  // Several samples share the prompt's pages, and one page more is needed to
  // copy the partly filled one.
  const int64_t needed = KvPool::PagesFor(SequenceTokens(request)) +
                         (request.num_samples > 1 ? 1 : 0);
  if (needed <= pool_.num_pages()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "prompt and config.max_tokens need ", needed * pool_.bytes_per_page(),
      " bytes of key/value cache, there are ",
      pool_.num_pages() * pool_.bytes_per_page(), " (--kv-cache-bytes)"));
}

bool SampleLoop::HasRoom(const SampleRequest& request) const {
  // Waiting sequences take their pages first. Each running sequence needs one
  // more page.
  int64_t promised =
      KvPool::PagesFor(static_cast<int64_t>(request.prompt.size()));
  int num_sequences = 0;
  for (const auto& [age, sequence] : sequences_) {
    promised +=
        sequence.pages.has_value() ? 1 : KvPool::PagesFor(sequence.target());
    if (sequence.sample_index != kPrompt || !sequence.ready()) ++num_sequences;
  }
  return num_sequences < options_.max_decode_sequences &&
         promised <= pool_.available_pages();
}

bool SampleLoop::MakeRoom(int64_t count, Age age) {
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
    if (youngest == nullptr || AgeOf(*youngest) <= age) return false;
    Preempt(*youngest);
  }
  return true;
}

std::vector<SampleSequence*> SampleLoop::GrowRunning() {
  std::vector<SampleSequence*> running;
  for (auto& [age, sequence] : sequences_) {
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

SampleSequence* SampleLoop::Youngest() {
  for (auto& [age, sequence] : std::views::reverse(sequences_)) {
    if (sequence.pages.has_value()) return &sequence;
  }
  return nullptr;
}

at::Tensor SampleLoop::ExpertsOf(const SampleSequence& sequence) const {
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < sequence.length; ++i) {
    slots.push_back(sequence.pages->Slot(i));
  }
  return executor_.ReadExperts(slots);
}

void SampleLoop::AddRouting(const SampleSequence& sample) {
  SampleJob& job = *sample.job;
  if (!job.request->return_routing) return;
  const at::Tensor experts_NE = ExpertsOf(sample);
  const auto* first = experts_NE.const_data_ptr<int16_t>();
  std::vector<uint16_t>& routing =
      job.result.samples[sample.sample_index].routing;
  routing.assign(first, first + experts_NE.numel());
  if (job.streams) job.deltas.back().piece.routing = routing;
}

void SampleLoop::Preempt(SampleSequence& sequence) {
  // A sequence that is preempted before it has caught up has its experts
  // already.
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

void SampleLoop::CachePrefix(SampleSequence& sequence) {
  pool_.CachePrefix(sequence.job->weights_id(),
                    sequence.Tokens(sequence.length), *sequence.pages);
}

void SampleLoop::ForgetDeadVersions() {
  std::erase_if(versions_, [this](const auto& version) {
    const bool dead = version.second.expired();
    if (dead) pool_.Forget(version.first);
    return dead;
  });
}

void SampleLoop::ReportPages() {
  const int64_t page = pool_.bytes_per_page();
  probe_->SetKvBytes((pool_.num_pages() - pool_.available_pages()) * page,
                     pool_.prefix_pages() * page, pool_.num_pages() * page);
}

void SampleLoop::EraseSequences(const SampleJob& job) {
  std::erase_if(sequences_, [&](const auto& sequence) {
    return sequence.second.job == &job;
  });
}

void SampleLoop::EraseFailed() {
  for (const SampleJob& job : jobs_) {
    if (job.failed) EraseSequences(job);
  }
}

}  // namespace weft::engine
