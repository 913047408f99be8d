#include "src/engine/decode/sample_loop.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "src/base/clock.h"
#include "src/base/observe/profile.h"
#include "src/engine/decode/sample_routing.h"

namespace weft::engine {
namespace {

StopRule StopOf(const SampleRequest& request,
                const model_config::ModelConfig& config) {
  StopRule stop = request.config.stop;
  if (!stop.ignore_eos) {
    stop.token_ids.insert(stop.token_ids.end(), config.eos_token_ids.begin(),
                          config.eos_token_ids.end());
  }
  return stop;
}

// Removes what the request wants for its record alone.
void Hide(const SampleRequest& request, Sample* sample) {
  if (request.hide_routing) sample->routing.clear();
  if (request.hide_support) sample->support = {};
}

// Returns the plan of one decode iteration. Its rows are the last tokens of the
// sequences.
executor::CachePlan PlanDecode(const std::vector<SampleSequence*>& rows) {
  const auto count = static_cast<int64_t>(rows.size());
  size_t table_width = 0;
  for (const SampleSequence* s : rows) {
    table_width = std::max(table_width, s->pages->pages().size());
  }
  std::vector<int64_t> tokens, slots, states;
  std::vector<int32_t> positions, lengths;
  std::vector<int32_t> table(count * table_width, 0);
  executor::CachePlan plan;
  for (int64_t r = 0; r < count; ++r) {
    SampleSequence& s = *rows[r];
    tokens.push_back(s.job->result.samples[s.sample_index].tokens.back());
    positions.push_back(static_cast<int32_t>(s.length));
    slots.push_back(s.pages->Slot(s.length));
    if (const auto& state = s.pages->state().id()) states.push_back(*state);
    lengths.push_back(static_cast<int32_t>(s.length + 1));
    std::ranges::copy(s.pages->pages(), table.begin() + r * table_width);
    AddRows(plan.batch.routing, s.version, r, r + 1);
    plan.logit_rows.push_back(r);
    plan.draws.push_back(s.job->RuleOf(s.sample_index, r));
    s.AddEdits(r, plan.edits);
  }
  plan.logit_routing = plan.batch.routing;
  plan.batch.tokens_T = at::tensor(tokens, at::kLong);
  plan.batch.positions_T = at::tensor(positions, at::kInt);
  plan.kv = {
      .slots_T = at::tensor(slots, at::kLong),
      .decode = true,
      .page_table_TL = at::tensor(table, at::kInt)
                           .view({count, static_cast<int64_t>(table_width)}),
      .lengths_T = at::tensor(lengths, at::kInt)};
  if (!states.empty()) plan.kv.state_slots_Q = at::tensor(states, at::kLong);
  return plan;
}

// Notes which version drew the sample's last token.
void AddSpan(const SampleSequence& sequence, Sample& sample) {
  // The version that drew all first tokens may be older than the one with which
  // the sample starts.
  const uint64_t version = sample.tokens.size() == 1
                               ? sequence.job->result.version
                               : sequence.version->number;
  std::vector<VersionSpan>& spans = sample.version_spans;
  if (spans.empty() || spans.back().version != version) {
    spans.push_back({.version = version});
  }
  ++spans.back().tokens;
}

}  // namespace

SampleLoop::SampleLoop(executor::Executor* executor,
                       const SampleLoopOptions& options,
                       const sampling::TokenBytes* token_bytes,
                       EngineProbe* probe)
    : executor_(*executor),
      options_(options),
      token_bytes_(token_bytes),
      probe_(probe),
      threads_(options.adapt_threads),
      sequences_(executor, options.kv_cache_bytes, options.max_decode_sequences,
                 options.tenant_weights, options.latest, probe),
      prefill_(executor, &sequences_, probe, options.max_prefill_tokens,
               options.max_decode_sequences, options.tenant_weights) {
  if (options.decode_graphs) {
    executor->UseDecodeGraphs(options.max_decode_sequences);
  }
}

void SampleLoop::Admit(const dispatch::SampleTask& task,
                       lora::AdapterVersionPtr version) {
  const SampleRequest* const request = task.request;
  SampleJob& job = jobs_.emplace_back();
  job.work_id = task.id;
  job.adapter = task.adapter;
  job.flow = task.flow;
  job.tenant = task.tenant;
  job.order = next_order_++;
  job.request = request;
  job.streams = task.streams;
  job.accepted_at = task.accepted_at;
  job.result.version = version == nullptr ? 0 : version->number;
  job.stop = StopOf(*request, config());
  job.result.samples.resize(request->num_samples);
  job.num_scored = request->first_scored();
  // The entries of tokens without a score are placeholders.
  const auto without = static_cast<size_t>(request->first_of_last_n());
  if (request->prompt_logprobs) job.result.prompt_logprobs.resize(without);
  if (request->prompt_top_logprobs > 0) {
    job.result.prompt_top_logprobs.resize(without);
  }
  if (request->prompt_alternatives > 0) {
    job.result.prompt_alternatives.resize(1);
  }
  sequences_.Add({.job = &job,
                  .sample_index = kPrompt,
                  .version = std::move(version),
                  .pages = std::nullopt,
                  .stop = sampling::StopMatcher(job.stop, token_bytes_),
                  .edits = sampling::SequenceEdits(&job.edits)});
}

absl::Status SampleLoop::CheckFits(const SampleRequest& request) const {
  return sequences_.CheckFits(request);
}

bool SampleLoop::HasRoom(const SampleRequest& request,
                         const std::string& tenant) {
  return sequences_.HasRoom(request, tenant);
}

bool SampleLoop::Cancel(uint64_t work_id) {
  const auto job = std::ranges::find(jobs_, work_id, &SampleJob::work_id);
  if (job == jobs_.end()) return false;
  sequences_.EraseAllOf(*job);
  jobs_.erase(job);
  sequences_.ReportPages();
  return true;
}

std::vector<uint64_t> SampleLoop::CancelAll() {
  std::vector<uint64_t> ids;
  for (const SampleJob& job : jobs_) ids.push_back(job.work_id);
  sequences_.Clear();
  jobs_.clear();
  sequences_.ReportPages();
  return ids;
}

std::vector<SampleEvent> SampleLoop::Step() {
  sequences_.TakeVersions();
  sequences_.ForgetDeadVersions();
  Decode();
  prefill_.Run();
  EraseFailed();
  StartSamples();
  sequences_.ReportPages();
  return CollectEvents();
}

void SampleLoop::StartSamples() {
  std::set<std::string> waiting;  // Tenants whose next sample found no page.
  while (SampleJob* next = NextToStart(waiting)) {
    if (!StartSample(*next)) waiting.insert(next->tenant);
  }
}

SampleJob* SampleLoop::NextToStart(const std::set<std::string>& without) {
  // A preempted sample continues before younger samples of its tenant start.
  std::map<std::string, uint64_t> preempted;
  for (const auto& [age, sequence] : sequences_.by_age()) {
    if (sequence.sample_index != kPrompt && !sequence.pages.has_value()) {
      preempted.try_emplace(sequence.job->tenant, age.first);
    }
  }
  // A tenant's job with the fewest running samples is next, so that a request
  // for hundreds of samples does not delay the first sample of another request.
  std::map<std::string, SampleJob*> next_of;
  for (SampleJob& job : jobs_) {
    if (!job.HasMoreToStart() || without.contains(job.tenant)) continue;
    const auto older = preempted.find(job.tenant);
    if (older != preempted.end() && job.order >= older->second) continue;
    if (!sequences_.PromptOf(job).ready()) continue;
    SampleJob*& next = next_of[job.tenant];
    if (next == nullptr || job.num_running() < next->num_running()) next = &job;
  }
  (void)sequences_.InOrder();
  SampleJob* first = nullptr;
  for (const auto& [tenant, job] : next_of) {
    if (!sequences_.HasSlotFor(*job)) continue;
    if (first == nullptr ||
        sequences_.PromptOf(*job).place < sequences_.PromptOf(*first).place) {
      first = job;
    }
  }
  return first;
}

bool SampleLoop::StartSample(SampleJob& job) {
  SampleSequence& prompt = sequences_.PromptOf(job);
  std::optional<dispatch::SequencePages> pages;
  if (job.num_started + 1 < job.request->num_samples) {
    pages = sequences_.Fork(prompt);
    if (!pages.has_value()) return false;
  } else {
    // The last sample needs no copy: it takes over the prompt's pages.
    pages = std::exchange(prompt.pages, std::nullopt);
  }
  const int index = job.num_started++;
  SampleSequence sample{.job = &job,
                        .sample_index = index,
                        .version = prompt.version,
                        .pages = std::move(pages),
                        .length = prompt.length,
                        .stop = prompt.stop,
                        .edits = sampling::SequenceEdits(&job.edits)};
  const std::optional<sampling::DrawResult> drawn =
      std::exchange(job.first_draws[index], std::nullopt);
  if (!job.HasMoreToStart()) sequences_.Erase(prompt.age());
  if (!drawn.has_value()) {
    job.failed = true;
    sequences_.EraseAllOf(job);
    return true;
  }
  if (index == 0) probe_->ObserveFirstToken(SteadyNow() - job.accepted_at);
  if (Accept(sample, *drawn)) {
    AddRouting(sample);
  } else {
    sequences_.Add(std::move(sample));
  }
  return true;
}

void SampleLoop::Decode() {
  std::vector<SampleSequence*> rows = sequences_.GrowRunning();
  if (rows.empty()) return;
  const profile::Span span("decode iteration", "sequences",
                           static_cast<int64_t>(rows.size()));
  const absl::Time start = SteadyNow();
  // Sorts the rows by adapter version, so that each version's weights are read
  // once.
  std::ranges::stable_sort(
      rows, {}, [](const SampleSequence* s) { return s->version.get(); });

  executor::CacheOutput result;
  threads_.Run([&] { result = executor_.Run(PlanDecode(rows)); });
  const auto& [logprobs, drawn, by_graph] = result;
  for (size_t r = 0; r < rows.size(); ++r) {
    SampleSequence& s = *rows[r];
    if (!drawn[r].has_value()) {
      s.job->failed = true;
      continue;
    }
    ++s.length;
    if (Accept(s, *drawn[r])) {
      AddRouting(s);
      sequences_.CachePrefix(s, /*ends=*/true);
      sequences_.Erase(s.age());
    }
  }
  EraseFailed();
  probe_->ObserveDecode(static_cast<int64_t>(rows.size()), by_graph,
                        SteadyNow() - start);
  const executor::DecodeGraphStats graphs = executor_.decode_graphs();
  probe_->SetDecodeGraphs(graphs.graphs, graphs.bytes);
}

void SampleLoop::EraseFailed() {
  for (const SampleJob& job : jobs_) {
    if (job.failed) sequences_.EraseAllOf(job);
  }
}

void SampleLoop::AddRouting(const SampleSequence& sample) {
  SampleJob& job = *sample.job;
  if (!job.request->return_routing) return;
  const at::Tensor experts_NE = sequences_.ExpertsOf(sample);
  const auto* first = experts_NE.const_data_ptr<int16_t>();
  std::vector<uint16_t>& routing =
      job.result.samples[sample.sample_index].routing;
  routing.assign(first, first + experts_NE.numel());
  if (job.streams) job.deltas.back().piece.routing = routing;
}

bool SampleLoop::Accept(SampleSequence& sequence,
                        const sampling::DrawResult& drawn) {
  SampleJob& job = *sequence.job;
  const SamplingConfig& config = job.request->config;
  Sample& sample = job.result.samples[sequence.sample_index];
  probe_->CountSampledToken();
  sample.tokens.push_back(drawn.token);
  sample.logprobs.push_back(drawn.logprob);
  if (job.request->top_logprobs > 0) {
    sample.top_logprobs.push_back(drawn.top_logprobs);
  }
  if (job.request->has_support()) sample.support.Add(drawn.support);
  if (job.request->in_flight) AddSpan(sequence, sample);
  sequence.edits.Push(drawn.token);
  const auto num_tokens = static_cast<int>(sample.tokens.size());
  if (sequence.stop.Push(drawn.token) && num_tokens > config.min_tokens) {
    sample.finish_reason = FinishReason::kStop;
  } else if (num_tokens >= config.max_tokens) {
    sample.finish_reason = FinishReason::kLength;
  }
  const bool ends = sample.finish_reason != FinishReason::kNone;
  if (ends) ++job.num_finished;
  if (ends && !job.request->record.empty()) {
    sample.sequence_id = SequenceId(job.request->record,
                                    static_cast<size_t>(sequence.sample_index));
  }
  if (job.streams) {
    SampleDelta delta{.sample_index = sequence.sample_index,
                      .piece = {.tokens = {drawn.token},
                                .logprobs = {drawn.logprob},
                                .finish_reason = sample.finish_reason,
                                .sequence_id = sample.sequence_id},
                      .version = job.result.version};
    if (job.request->in_flight) {
      delta.piece.version_spans = {
          {.version = sample.version_spans.back().version, .tokens = 1}};
    }
    if (job.request->top_logprobs > 0) {
      delta.piece.top_logprobs.push_back(drawn.top_logprobs);
    }
    if (ends) delta.piece.support = sample.support;
    if (!std::exchange(job.sent_prompt_scores, true)) {
      delta.prompt_logprobs = job.result.prompt_logprobs;
      delta.prompt_top_logprobs = job.result.prompt_top_logprobs;
      delta.prompt_target_logprobs = job.result.prompt_target_logprobs;
      delta.prompt_alternatives = job.result.prompt_alternatives;
      delta.prompt_cached_tokens = job.result.prompt_cached_tokens;
    }
    job.deltas.push_back(std::move(delta));
  }
  return ends;
}

std::vector<SampleEvent> SampleLoop::CollectEvents() {
  std::vector<SampleEvent> events;
  for (auto job = jobs_.begin(); job != jobs_.end();) {
    const SampleRequest& request = *job->request;
    for (SampleDelta& delta : job->deltas) Hide(request, &delta.piece);
    const bool finished =
        job->failed || job->num_finished == request.num_samples;
    if (finished || !job->deltas.empty()) {
      events.push_back({.work_id = job->work_id,
                        .deltas = std::exchange(job->deltas, {}),
                        .finished = finished});
    }
    if (finished) {
      if (job->failed) {
        events.back().result = absl::FailedPreconditionError(
            "the logits are not finite: the adapter's weights have diverged");
      } else {
        if (!request.record.empty()) {
          events.back().record = RecordOf(request, job->adapter, job->result);
        }
        for (Sample& sample : job->result.samples) Hide(request, &sample);
        events.back().result = std::move(job->result);
      }
      job = jobs_.erase(job);
    } else {
      ++job;
    }
  }
  return events;
}

}  // namespace weft::engine
