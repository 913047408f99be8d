#include "src/engine/decode/sample_sequences.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::engine {
namespace {

// Returns the most tokens of a prompt and one of its samples for which an empty
// cache has room. Several samples share the prompt's full pages, and a copy of
// the partly filled page needs one page more. The model does not read the last
// drawn token, so the cache has no slot for it.
int64_t MostTokens(int64_t num_pages, int num_samples) {
  return (num_pages - (num_samples > 1 ? 1 : 0)) * kPageTokens + 1;
}

}  // namespace

SampleSequences::SampleSequences(executor::Executor* executor,
                                 int64_t kv_cache_bytes, int max_running,
                                 std::map<std::string, int64_t> weights,
                                 LatestVersion latest, EngineProbe* probe)
    : executor_(*executor),
      probe_(probe),
      max_running_(max_running),
      pool_(CacheUnitsOf(SizesOf(executor->decoder())),
            CountsIn(CacheUnitsOf(SizesOf(executor->decoder())), kv_cache_bytes,
                     max_running),
            [executor](const CacheCopy& copy) { executor->Copy(copy); }),
      order_(max_running, pool_.num_pages(), std::move(weights)),
      latest_(std::move(latest)) {
  executor->MakeCache(pool_.num_pages(), kPageTokens, pool_.num_slots());
}

absl::Status SampleSequences::CheckFits(const SampleRequest& request) const {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t most =
      MostTokens(pool_.num_pages(), request.num_samples) - prompt;
  if (request.config.max_tokens <= most) return absl::OkStatus();
  const int64_t states = pool_.num_slots() * pool_.bytes_per_state();
  const std::string cache = absl::StrCat(
      "the cache of keys and values has ",
      pool_.num_pages() * pool_.bytes_per_page(), " bytes for ",
      pool_.num_pages() * kPageTokens, " tokens; raise --kv-cache-bytes",
      states > 0 ? absl::StrCat(", of which states take ", states) : "");
  if (most < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("prompt has ", prompt, " values, must have at most ",
                     prompt + most - 1, ": ", cache));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "config.max_tokens is ", request.config.max_tokens, ", must be in [1, ",
      most, "] after a prompt of ", prompt, ": ", cache));
}

int64_t SampleSequences::cached_tokens() const {
  return MostTokens(pool_.num_pages(), /*num_samples=*/2);
}

bool SampleSequences::HasRoom(const SampleRequest& request,
                              const std::string& tenant) {
  if (std::ranges::none_of(sequences_, [&](const auto& entry) {
        return entry.second.job->tenant == tenant;
      })) {
    return true;
  }
  const dispatch::DecodeOrder::Place next = NextPlace(tenant);
  // Counts the pages that this prompt and waiting sequences need, and one more
  // page for each sequence that has pages. Sequences behind yield theirs.
  int64_t needed =
      KvPool::PagesFor(static_cast<int64_t>(request.prompt.size()));
  int64_t yielded = 0;
  int64_t num_states = 1;
  int num_sequences = 0;
  for (const SampleSequence* sequence : InOrder()) {
    const bool has_pages = sequence->pages.has_value();
    if (next < sequence->place) {
      if (has_pages)
        yielded += static_cast<int64_t>(sequence->pages->pages().size());
      continue;
    }
    needed += has_pages ? 1 : KvPool::PagesFor(sequence->target());
    ++num_states;
    if (sequence->sample_index != kPrompt || !sequence->ready())
      ++num_sequences;
  }
  return num_sequences < max_running_ &&
         needed <= pool_.available_pages() + yielded &&
         (!pool_.has_states() || num_states <= pool_.num_states());
}

std::vector<SampleSequence*> SampleSequences::Line() {
  const bool several =
      std::ranges::any_of(sequences_, [this](const auto& entry) {
        return entry.second.job->tenant !=
               sequences_.begin()->second.job->tenant;
      });
  std::vector<SampleSequence*> line;
  SampleSequence* prompt = nullptr;
  for (auto& [age, sequence] : sequences_) {
    if (prompt != nullptr && prompt->job != sequence.job) {
      line.push_back(std::exchange(prompt, nullptr));
    }
    if (several && sequence.only_forks()) {
      prompt = &sequence;
    } else {
      line.push_back(&sequence);
    }
  }
  if (prompt != nullptr) line.push_back(prompt);
  return line;
}

std::vector<dispatch::DecodeOrder::Member> SampleSequences::MembersOf(
    const std::vector<SampleSequence*>& line) {
  std::vector<dispatch::DecodeOrder::Member> members;
  const SampleJob* job = nullptr;
  for (const SampleSequence* sequence : line) {
    int64_t pages = KvPool::PagesFor(sequence->target());
    // The samples of a request share the full pages of its prompt.
    if (sequence->job == job) {
      pages -= static_cast<int64_t>(job->request->prompt.size()) / kPageTokens;
    }
    job = sequence->job;
    members.push_back({.tenant = job->tenant,
                       .age = sequence->age(),
                       .slots = sequence->only_forks() ? 0 : 1,
                       .pages = pages});
  }
  return members;
}

std::vector<SampleSequence*> SampleSequences::InOrder() {
  std::vector<SampleSequence*> line = Line();
  const std::vector<dispatch::DecodeOrder::Place> places =
      order_.Places(MembersOf(line));
  for (size_t i = 0; i < line.size(); ++i) line[i]->place = places[i];
  std::ranges::sort(line, {}, [](const SampleSequence* s) { return s->place; });
  int num_samples = 0;
  for (SampleSequence* sequence : line) {
    if (sequence->sample_index != kPrompt) ++num_samples;
    sequence->has_slot = num_samples <= max_running_;
  }
  return line;
}

dispatch::DecodeOrder::Place SampleSequences::NextPlace(
    const std::string& tenant) {
  std::vector<dispatch::DecodeOrder::Member> members = MembersOf(Line());
  members.push_back({.tenant = tenant, .age = {UINT64_MAX, kPrompt}});
  return order_.Places(members).back();
}

bool SampleSequences::HasSlotFor(const SampleJob& job) {
  const SampleSequence& prompt = PromptOf(job);
  return std::ranges::count_if(sequences_, [&](const auto& entry) {
           const SampleSequence& sequence = entry.second;
           if (sequence.sample_index == kPrompt) return false;
           // A younger sample without pages may wait for those of the prompt.
           return sequence.job->tenant == job.tenant
                      ? sequence.pages.has_value()
                      : sequence.place < prompt.place;
         }) < max_running_;
}

void SampleSequences::Add(SampleSequence sequence) {
  if (sequence.version != nullptr) {
    versions_[sequence.weights_id()] = sequence.version;
  }
  sequences_.emplace(sequence.age(), std::move(sequence));
}

void SampleSequences::EraseAllOf(const SampleJob& job) {
  std::erase_if(sequences_, [&](const auto& sequence) {
    return sequence.second.job == &job;
  });
}

bool SampleSequences::TakePages(SampleSequence& sequence) {
  SampleJob& job = *sequence.job;
  const int64_t target = sequence.target();
  // Keys and values are cached, but hidden states are not. So prefill must
  // compute the rows that still need scores, and the last row of a prompt, from
  // which the samples draw their first tokens.
  const bool is_new =
      sequence.sample_index == kPrompt && job.first_draws.empty();
  const int64_t reusable = is_new ? job.num_scored - 1 : target;
  dispatch::SequencePages pages = pool_.Begin(
      sequence.weights_id(), sequence.Tokens(reusable), &sequence.fork_tokens);
  const int64_t found = pages.num_tokens();
  if (!MakeRoom(KvPool::PagesFor(target - found), pages, job.tenant,
                sequence.place) ||
      !pool_.Append(pages, target - found) || !pool_.TakeState(pages)) {
    return false;
  }
  sequence.pages = std::move(pages);
  sequence.length = found;
  // A prompt that was preempted finds the tokens that it has computed itself.
  if (!std::exchange(job.looked_up, true)) {
    job.result.prompt_cached_tokens = found;
  }
  probe_->CountPrefixLookup(target, found);
  return true;
}

std::optional<dispatch::SequencePages> SampleSequences::Fork(
    const SampleSequence& prompt) {
  // The new page is for a copy of a partly filled page, or for the next token.
  if (!MakeRoom(1, *prompt.pages, prompt.job->tenant, prompt.place))
    return std::nullopt;
  return pool_.Fork(*prompt.pages);
}

int64_t SampleSequences::SparePages(bool* moves) const {
  int64_t num_running = 0;
  *moves = false;
  for (const auto& [key, sequence] : sequences_) {
    if (!sequence.pages.has_value()) continue;
    if (sequence.sample_index != kPrompt) ++num_running;
    *moves |= sequence.sample_index != kPrompt ? sequence.has_slot
                                               : !sequence.ready();
  }
  return pool_.available_pages() - num_running;
}

bool SampleSequences::MakeRoom(int64_t count,
                               const dispatch::SequencePages& from,
                               const std::string& tenant,
                               const dispatch::DecodeOrder::Place& place) {
  bool moves = false;
  const auto has_room = [&] {
    return count <= SparePages(&moves) && pool_.HasRoomForState(from);
  };
  while (!has_room()) {
    SampleSequence* other = LastBehind(place, &tenant);
    if (other == nullptr) break;
    Preempt(*other);
  }
  if (has_room()) return true;
  if (moves) return false;
  while (count > pool_.available_pages() || !pool_.HasRoomForState(from)) {
    SampleSequence* last = LastBehind(place, /*passed=*/nullptr);
    if (last == nullptr) return false;
    Preempt(*last);
  }
  return true;
}

std::vector<SampleSequence*> SampleSequences::GrowRunning() {
  std::vector<SampleSequence*> running;
  for (SampleSequence* sequence : InOrder()) {
    if (!sequence->has_slot) break;
    if (sequence->sample_index == kPrompt || !sequence->ready()) continue;
    const auto has_place = [&] {
      return sequence->pages->num_tokens() > sequence->length ||
             pool_.Append(*sequence->pages, 1);
    };
    while (sequence->pages.has_value() && !has_place()) {
      SampleSequence* last = LastBehind(sequence->place, /*passed=*/nullptr);
      Preempt(last == nullptr ? *sequence : *last);
    }
    if (sequence->pages.has_value()) running.push_back(sequence);
  }
  return running;
}

// Returns whether a sequence at `place`, which has no pages, may take those of
// `other`, which is behind it. Tenants near their shares would take each
// other's pages again and again, and pay for each prefill. So the tenant must
// stay at or below the other's share, unless it would have nothing.
bool SampleSequences::MayTakeFrom(const dispatch::DecodeOrder::Place& place,
                                  const SampleSequence& other) {
  return place.share == 0 || place.end <= other.place.share;
}

SampleSequence* SampleSequences::LastBehind(
    const dispatch::DecodeOrder::Place& place, const std::string* passed) {
  SampleSequence* last = nullptr;
  for (auto& [age, sequence] : sequences_) {
    if (!sequence.pages.has_value() || sequence.place <= place) continue;
    if (passed != nullptr &&
        (sequence.job->tenant == *passed || !MayTakeFrom(place, sequence))) {
      continue;
    }
    if (last == nullptr || last->place < sequence.place) last = &sequence;
  }
  return last;
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
  DropPages(sequence);
  probe_->CountPreemption();
}

void SampleSequences::DropPages(SampleSequence& sequence) {
  CachePrefix(sequence, /*ends=*/true);
  sequence.pages.reset();
  sequence.length = 0;
  if (!sequence.experts_NE.defined()) sequence.has_old_keys = false;
}

void SampleSequences::TakeVersions() {
  for (auto& [age, sequence] : sequences_) {
    const SampleJob& job = *sequence.job;
    if (!job.request->in_flight || !sequence.may_take_version()) continue;
    lora::AdapterVersionPtr latest = latest_(job.adapter);
    if (latest != nullptr && latest != sequence.version) {
      TakeVersion(sequence, std::move(latest));
    }
  }
}

void SampleSequences::TakeVersion(SampleSequence& sequence,
                                  lora::AdapterVersionPtr version) {
  SampleJob& job = *sequence.job;
  const bool recompute = job.request->recompute_cache;
  if (recompute && sequence.pages.has_value()) DropPages(sequence);
  // Where no token was drawn with the old version's experts, the new version
  // chooses experts itself.
  if (recompute || job.first_draws.empty()) sequence.experts_NE.reset();
  sequence.has_old_keys =
      sequence.pages.has_value() || sequence.experts_NE.defined();
  versions_[version->id.value()] = version;
  if (job.first_draws.empty()) job.result.version = version->number;
  sequence.version = std::move(version);
}

int64_t SampleSequences::EndOfPiece(const SampleSequence& sequence,
                                    int64_t end) const {
  if (!pool_.has_states()) return end;
  for (const int64_t place : sequence.StatePlaces()) {
    if (sequence.length < place && place < end) return place;
  }
  return end;
}

void SampleSequences::CachePrefix(SampleSequence& sequence, bool ends) {
  if (sequence.has_old_keys) return;
  const uint64_t version = sequence.weights_id();
  const std::vector<int32_t> tokens = sequence.Tokens(sequence.length);
  pool_.CachePrefix(version, tokens, *sequence.pages);
  if (!pool_.has_states()) return;
  const auto places = sequence.StatePlaces();
  if (ends || std::ranges::find(places, sequence.length) != places.end()) {
    pool_.CacheState(version, tokens, *sequence.pages, ends);
  }
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
  const int64_t state = pool_.bytes_per_state();
  probe_->SetStateBytes((pool_.num_states() - pool_.available_states()) * state,
                        pool_.num_states() * state);
}

}  // namespace weft::engine
