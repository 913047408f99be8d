#include "src/engine/sample_loop.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/loss/fused_head.h"
#include "src/loss/logits.h"

namespace weft::engine {
namespace {

StopRule StopOf(const SampleRequest& request,
                const model::ModelConfig& config) {
  if (request.config.stop.has_value()) return *request.config.stop;
  return {.token_ids = config.eos_token_ids};
}

// Extends the routing by one row, merging neighbours of one version.
void AddRow(lora::LoraRouting& routing, const lora::AdapterVersionPtr& version,
            int64_t begin, int64_t end) {
  if (version == nullptr) return;
  if (!routing.empty() && routing.back().version == version &&
      routing.back().end == begin) {
    routing.back().end = end;
    return;
  }
  routing.push_back(
      {.begin = begin, .end = end, .version = version, .gradient_N = {}});
}

}  // namespace

SampleLoop::SampleLoop(const model::Decoder& decoder,
                       const SampleLoopOptions& options,
                       const sampling::TokenBytes* token_bytes,
                       EngineProbe* probe)
    : decoder_(decoder),
      options_(options),
      token_bytes_(token_bytes),
      probe_(probe),
      pool_(decoder.config(), options.kv_cache_bytes, decoder.dtype(),
            decoder.device()) {}

int64_t SampleLoop::SequenceTokens(const SampleRequest& request) const {
  // The last token drawn is never fed back.
  return static_cast<int64_t>(request.prompt.size()) +
         request.config.max_tokens - 1;
}

int64_t SampleLoop::PagesToStart(const SampleRequest& request) const {
  // One more for the copy of a page that the prompt shares with its samples.
  return KvPool::PagesFor(SequenceTokens(request)) +
         (request.num_samples > 1 ? 1 : 0);
}

absl::Status SampleLoop::CheckFits(const SampleRequest& request) const {
  const int64_t needed = PagesToStart(request);
  if (needed <= pool_.num_pages()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "prompt and config.max_tokens need ", needed * pool_.bytes_per_page(),
      " bytes of key/value cache, there are ",
      pool_.num_pages() * pool_.bytes_per_page(), " (--kv-cache-bytes)"));
}

bool SampleLoop::HasRoom(const SampleRequest& request) const {
  // Pages that admitted requests will take for prompt and next sample: with
  // them each can always run, if only one sample at a time.
  int64_t promised = PagesToStart(request);
  int to_start = static_cast<int>(sequences_.size());
  for (const Job& job : jobs_) {
    if (!job.prefilled) {
      promised += PagesToStart(*job.request);
      ++to_start;
    } else if (job.HasMoreToStart()) {
      promised += PagesToStart(*job.request);
    }
  }
  return to_start < options_.max_decode_sequences &&
         promised <= pool_.free_pages();
}

void SampleLoop::Admit(uint64_t work_id, const SampleRequest* request,
                       bool streams, absl::Time accepted_at,
                       lora::AdapterVersionPtr version) {
  Job& job = jobs_.emplace_back();
  job.work_id = work_id;
  job.request = request;
  job.streams = streams;
  job.accepted_at = accepted_at;
  job.result.version = version == nullptr ? 0 : version->number;
  job.version = std::move(version);
  job.stop = StopOf(*request, decoder_.config());
  job.result.samples.resize(request->num_samples);
}

bool SampleLoop::Cancel(uint64_t work_id) {
  const auto job = std::ranges::find(jobs_, work_id, &Job::work_id);
  if (job == jobs_.end()) return false;
  std::erase_if(sequences_, [&](const Sequence& s) { return s.job == &*job; });
  jobs_.erase(job);
  return true;
}

std::vector<uint64_t> SampleLoop::CancelAll() {
  std::vector<uint64_t> ids;
  for (const Job& job : jobs_) ids.push_back(job.work_id);
  sequences_.clear();
  jobs_.clear();
  return ids;
}

std::vector<SampleEvent> SampleLoop::Step() {
  Decode();
  Prefill();
  StartSamples();
  probe_->SetKvBytes(
      (pool_.num_pages() - pool_.free_pages()) * pool_.bytes_per_page(),
      pool_.num_pages() * pool_.bytes_per_page());
  return CollectEvents();
}

void SampleLoop::Prefill() {
  std::vector<Job*> batch;
  int64_t num_tokens = 0;
  for (Job& job : jobs_) {
    if (job.prefilled) continue;
    const auto prompt = static_cast<int64_t>(job.request->prompt.size());
    if (!batch.empty() && num_tokens + prompt > options_.max_prefill_tokens) {
      break;
    }
    // With one sample the prompt's pages become the sample's own.
    const bool single = job.request->num_samples == 1;
    job.prompt_pages =
        pool_.Allocate(single ? SequenceTokens(*job.request) : prompt);
    if (!job.prompt_pages.has_value()) break;
    batch.push_back(&job);
    num_tokens += prompt;
  }
  if (batch.empty()) return;
  const absl::Time start = absl::Now();
  PrefillBatch(batch);
  probe_->ObservePrefill(num_tokens, absl::Now() - start);
}

void SampleLoop::PrefillBatch(const std::vector<Job*>& jobs) {
  std::vector<int64_t> tokens;
  std::vector<int32_t> positions;
  std::vector<int64_t> slots;
  model::PackedBatch batch;
  for (Job* job : jobs) {
    const auto begin = static_cast<int64_t>(tokens.size());
    const std::vector<int32_t>& prompt = job->request->prompt;
    tokens.insert(tokens.end(), prompt.begin(), prompt.end());
    for (size_t i = 0; i < prompt.size(); ++i) {
      positions.push_back(static_cast<int32_t>(i));
      slots.push_back(job->prompt_pages->Slot(static_cast<int64_t>(i)));
    }
    const auto end = static_cast<int64_t>(tokens.size());
    batch.nodes.push_back({.begin = begin, .end = end, .subtree_end = end});
    AddRow(batch.routing, job->version, begin, end);
  }
  const at::Device device = decoder_.device();
  batch.tokens_T = at::tensor(tokens, at::kLong).to(device);
  batch.positions_T = at::tensor(positions, at::kInt).to(device);
  model::KvAccess kv{.store = &pool_.store(),
                     .slots_T = at::tensor(slots, at::kLong).to(device)};
  const at::Tensor x_TH = decoder_.ForwardLayers(
      model::Mode::kEval, batch, /*tape=*/nullptr, /*num_recomputed=*/0, &kv);
  ReadPromptScores(jobs, x_TH);
}

void SampleLoop::ReadPromptScores(const std::vector<Job*>& jobs,
                                  const at::Tensor& x_TH) {
  std::vector<int64_t> last_rows;
  lora::LoraRouting last_routing;
  int64_t row = 0;
  for (Job* job : jobs) {
    const auto length = static_cast<int64_t>(job->request->prompt.size());
    if (job->request->prompt_logprobs) {
      loss::ScoreRows rows;
      rows.row_offsets.push_back(0);
      for (int64_t i = 1; i < length; ++i) {
        rows.targets.push_back(job->request->prompt[i]);
        rows.row_offsets.push_back(i);
        rows.temperatures.push_back(1.0f);
      }
      AddRow(rows.routing, job->version, 0, length - 1);
      const loss::HeadResult scores =
          loss::ScoreHead(decoder_.FinalNorm(x_TH.narrow(0, row, length - 1)),
                          decoder_.weights().head_VH, rows,
                          {.softcap = decoder_.config().final_softcap},
                          /*want_gradient=*/false, /*want_entropy=*/false);
      const at::Tensor logprobs = scores.logprobs_E.to(at::kCPU);
      const float* data = logprobs.const_data_ptr<float>();
      job->result.prompt_logprobs.assign(1, 0.0f);
      job->result.prompt_logprobs.insert(job->result.prompt_logprobs.end(),
                                         data, data + length - 1);
    }
    row += length;
    const auto last = static_cast<int64_t>(last_rows.size());
    AddRow(last_routing, job->version, last, last + 1);
    last_rows.push_back(row - 1);
  }
  const at::Tensor last_RH =
      x_TH.index_select(0, at::tensor(last_rows, at::kLong).to(x_TH.device()));
  const at::Tensor logits_RV =
      loss::HeadLogits(decoder_.FinalNorm(last_RH), decoder_.weights().head_VH,
                       last_routing, decoder_.config().final_softcap);
  const float* data = logits_RV.const_data_ptr<float>();
  for (Job* job : jobs) {
    job->first_logits.assign(data, data + logits_RV.size(1));
    job->prefilled = true;
    data += logits_RV.size(1);
  }
}

void SampleLoop::StartSamples() {
  while (static_cast<int>(sequences_.size()) < options_.max_decode_sequences) {
    // The job with the fewest running samples is next: a request for hundreds
    // must not keep the first one of another waiting.
    Job* next = nullptr;
    for (Job& job : jobs_) {
      if (!job.prefilled || !job.HasMoreToStart()) continue;
      if (next == nullptr || job.num_running() < next->num_running()) {
        next = &job;
      }
    }
    if (next == nullptr || !StartSample(*next)) return;
    if (!next->HasMoreToStart()) {
      next->first_logits = {};
      next->prompt_pages.reset();
    }
  }
}

bool SampleLoop::StartSample(Job& job) {
  const SampleRequest& request = *job.request;
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  std::optional<kv::SequencePages> pages =
      request.num_samples == 1
          ? std::exchange(job.prompt_pages, std::nullopt)
          : pool_.Fork(*job.prompt_pages, SequenceTokens(request));
  if (!pages.has_value()) return false;
  const int index = job.num_started++;
  sampling::StopMatcher stop(job.stop, token_bytes_);
  const std::optional<sampling::DrawResult> drawn =
      Draw(job, index, job.first_logits.data());
  if (!drawn.has_value()) {
    FailJob(job);
    return true;
  }
  if (index == 0) probe_->ObserveFirstToken(absl::Now() - job.accepted_at);
  if (Accept(job, index, stop, *drawn)) return true;
  sequences_.push_back({.job = &job,
                        .sample_index = index,
                        .pages = *std::move(pages),
                        .last_token = drawn->token,
                        .length = prompt,
                        .stop = std::move(stop)});
  return true;
}

void SampleLoop::Decode() {
  if (sequences_.empty()) return;
  const absl::Time start = absl::Now();
  // Rows of one adapter version are neighbours, so that each version's weights
  // are used once.
  std::vector<Sequence*> rows;
  for (Sequence& sequence : sequences_) rows.push_back(&sequence);
  std::ranges::stable_sort(
      rows, {}, [](const Sequence* s) { return s->job->version.get(); });

  const auto count = static_cast<int64_t>(rows.size());
  size_t table_width = 0;
  for (const Sequence* s : rows) {
    table_width = std::max(table_width, s->pages.pages().size());
  }
  std::vector<int64_t> tokens, slots;
  std::vector<int32_t> positions, lengths;
  std::vector<int32_t> table(count * table_width, 0);
  model::PackedBatch batch;
  for (int64_t r = 0; r < count; ++r) {
    const Sequence& s = *rows[r];
    tokens.push_back(s.last_token);
    positions.push_back(static_cast<int32_t>(s.length));
    slots.push_back(s.pages.Slot(s.length));
    lengths.push_back(static_cast<int32_t>(s.length + 1));
    std::ranges::copy(s.pages.pages(), table.begin() + r * table_width);
    AddRow(batch.routing, s.job->version, r, r + 1);
  }
  const at::Device device = decoder_.device();
  batch.tokens_T = at::tensor(tokens, at::kLong).to(device);
  batch.positions_T = at::tensor(positions, at::kInt).to(device);
  model::KvAccess kv{
      .store = &pool_.store(),
      .slots_T = at::tensor(slots, at::kLong).to(device),
      .decode = true,
      .page_table_TL = at::tensor(table, at::kInt)
                           .view({count, static_cast<int64_t>(table_width)})
                           .to(device),
      .lengths_T = at::tensor(lengths, at::kInt).to(device)};
  const at::Tensor x_TH = decoder_.ForwardLayers(
      model::Mode::kEval, batch, /*tape=*/nullptr, /*num_recomputed=*/0, &kv);
  const at::Tensor logits_RV =
      loss::HeadLogits(decoder_.FinalNorm(x_TH), decoder_.weights().head_VH,
                       batch.routing, decoder_.config().final_softcap);

  std::vector<std::optional<sampling::DrawResult>> drawn(count);
  const float* logits = logits_RV.const_data_ptr<float>();
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      drawn[r] = Draw(*rows[r]->job, rows[r]->sample_index,
                      logits + r * logits_RV.size(1));
    }
  });
  std::vector<const Sequence*> ended;
  for (int64_t r = 0; r < count; ++r) {
    Sequence& s = *rows[r];
    if (!drawn[r].has_value()) {
      FailJob(*s.job);
      continue;
    }
    s.last_token = drawn[r]->token;
    ++s.length;
    if (Accept(*s.job, s.sample_index, s.stop, *drawn[r])) ended.push_back(&s);
  }
  std::erase_if(sequences_, [&](const Sequence& s) {
    return s.job->failed || std::ranges::find(ended, &s) != ended.end();
  });
  probe_->ObserveDecode(count, absl::Now() - start);
}

std::optional<sampling::DrawResult> SampleLoop::Draw(
    const Job& job, int sample_index, const float* logits) const {
  const SamplingConfig& config = job.request->config;
  const auto position =
      static_cast<uint32_t>(job.result.samples[sample_index].tokens.size());
  return sampling::DrawToken(
      absl::MakeConstSpan(logits, decoder_.config().vocab),
      {.temperature = config.temperature,
       .top_k = config.top_k,
       .top_p = config.top_p,
       .top_logprobs = job.request->top_logprobs},
      sampling::CounterUniform(config.seed, static_cast<uint32_t>(sample_index),
                               position));
}

void SampleLoop::FailJob(Job& job) {
  job.failed = true;
  job.first_logits = {};
  job.prompt_pages.reset();
}

bool SampleLoop::Accept(Job& job, int sample_index, sampling::StopMatcher& stop,
                        const sampling::DrawResult& drawn) {
  Sample& sample = job.result.samples[sample_index];
  probe_->CountSampledToken();
  sample.tokens.push_back(drawn.token);
  sample.logprobs.push_back(drawn.logprob);
  if (job.request->top_logprobs > 0) {
    sample.top_logprobs.push_back(drawn.top_logprobs);
  }
  if (stop.Push(drawn.token)) {
    sample.finish_reason = FinishReason::kStop;
  } else if (static_cast<int>(sample.tokens.size()) >=
             job.request->config.max_tokens) {
    sample.finish_reason = FinishReason::kLength;
  }
  const bool ends = sample.finish_reason != FinishReason::kNone;
  if (ends) ++job.num_finished;
  if (job.streams) {
    SampleDelta delta{.sample_index = sample_index,
                      .piece = {.tokens = {drawn.token},
                                .logprobs = {drawn.logprob},
                                .finish_reason = sample.finish_reason},
                      .version = job.result.version};
    if (job.request->top_logprobs > 0) {
      delta.piece.top_logprobs.push_back(drawn.top_logprobs);
    }
    if (!job.sent_prompt_logprobs) {
      delta.prompt_logprobs = job.result.prompt_logprobs;
      job.sent_prompt_logprobs = true;
    }
    job.deltas.push_back(std::move(delta));
  }
  return ends;
}

std::vector<SampleEvent> SampleLoop::CollectEvents() {
  std::vector<SampleEvent> events;
  for (auto job = jobs_.begin(); job != jobs_.end();) {
    const bool finished =
        job->failed || job->num_finished == job->request->num_samples;
    if (finished || !job->deltas.empty()) {
      events.push_back({.work_id = job->work_id,
                        .deltas = std::exchange(job->deltas, {}),
                        .finished = finished});
    }
    if (finished) {
      if (job->failed) {
        std::erase_if(sequences_,
                      [&](const Sequence& q) { return q.job == &*job; });
        events.back().result = absl::FailedPreconditionError(
            "the logits are not finite: the adapter's weights have diverged");
      } else {
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
