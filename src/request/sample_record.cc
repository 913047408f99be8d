#include "src/request/sample_record.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"

namespace weft {
namespace {

std::string DigestOf(const int32_t* tokens, size_t count) {
  return Sha256(
      {reinterpret_cast<const char*>(tokens), count * sizeof *tokens});
}

SequenceRecord SequenceOf(const Sample& sample, uint64_t version,
                          size_t prompt_routing) {
  SequenceRecord sequence{.tokens = sample.tokens,
                          .logprobs = sample.logprobs,
                          .versions = sample.version_spans,
                          .support = sample.support,
                          .routing = {}};
  if (sequence.versions.empty()) {
    sequence.versions = {
        {.version = version,
         .tokens = static_cast<uint32_t>(sample.tokens.size())}};
  }
  if (!sample.routing.empty()) {
    sequence.routing.assign(
        sample.routing.begin() + static_cast<int64_t>(prompt_routing),
        sample.routing.end());
  }
  return sequence;
}

// Replays the spans of one datum.
class DatumReplay {
 public:
  // `replay` outlives the object. `path` names the datum in errors.
  DatumReplay(const Replay& replay, std::string path, Datum* datum)
      : replay_(replay), path_(std::move(path)), datum_(*datum) {
    replaces_logprobs_ = replay.logprobs && datum_.logprobs.empty();
    if (replaces_logprobs_) {
      datum_.logprobs.assign(datum_.targets.size(), 0.0F);
      has_logprob_.assign(datum_.targets.size(), false);
    }
  }

  // `field` names the span in errors.
  absl::Status Add(const SampleRecord& record, size_t index,
                   const SampledSpan& span, const std::string& field) {
    if (index >= record.sequences.size()) {
      return Bad(field, absl::StrCat("sequence_id is '", span.sequence_id,
                                     "', but the record has ",
                                     record.sequences.size(), " sequences"));
    }
    const SequenceRecord& sequence = record.sequences[index];
    WEFT_RETURN_IF_ERROR(CheckTokens(sequence, span, field));
    if (replay_.logprobs) TakeLogprobs(sequence, span);
    if (replay_.support) TakeSupport(sequence, span);
    if (replay_.routing) TakeRouting(record, sequence, span);
    return absl::OkStatus();
  }

  // Call it after the last span.
  absl::Status Finish() {
    if (!supports_.empty()) datum_.support = Flatten();
    if (!replaces_logprobs_) return absl::OkStatus();
    for (size_t i = 0; i < has_logprob_.size(); ++i) {
      const bool weighs = datum_.weights.empty() || datum_.weights[i] != 0;
      if (has_logprob_[i] || !weighs) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          path_, ".logprobs is empty, but targets[", i,
          "] has a weight and is in no sampled span: send logprobs, or give "
          "the target weight 0"));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Bad(const std::string& field, absl::string_view problem) const {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ".", field, ".", problem));
  }

  absl::Status CheckTokens(const SequenceRecord& sequence,
                           const SampledSpan& span,
                           const std::string& field) const {
    const uint64_t end = uint64_t{span.offset} + span.length;
    if (end > sequence.tokens.size()) {
      return Bad(field, absl::StrCat("length is ", span.length, " at offset ",
                                     span.offset, ", but '", span.sequence_id,
                                     "' has ", sequence.tokens.size(),
                                     " drawn tokens"));
    }
    for (uint32_t i = 0; i < span.length; ++i) {
      const int32_t target = datum_.targets[span.start + i];
      const int32_t drawn = sequence.tokens[span.offset + i];
      if (target == drawn) continue;
      return Bad(field,
                 absl::StrCat("start covers targets[", span.start + i,
                              "] = ", target, ", but token ", span.offset + i,
                              " of '", span.sequence_id, "' is ", drawn,
                              ": name only what was drawn"));
    }
    for (uint32_t i = 1; i < span.length; ++i) {
      if (datum_.tokens[span.start + i] == datum_.targets[span.start + i - 1]) {
        continue;
      }
      return Bad(field, absl::StrCat("start covers tokens[", span.start + i,
                                     "], which is not the target before it"));
    }
    return absl::OkStatus();
  }

  void TakeLogprobs(const SequenceRecord& sequence, const SampledSpan& span) {
    std::copy_n(sequence.logprobs.begin() + span.offset, span.length,
                datum_.logprobs.begin() + span.start);
    if (!replaces_logprobs_) return;
    std::fill_n(has_logprob_.begin() + span.start, span.length, true);
  }

  void TakeSupport(const SequenceRecord& sequence, const SampledSpan& span) {
    if (sequence.support.offsets.empty()) return;
    supports_.resize(datum_.targets.size());
    for (uint32_t i = 0; i < span.length; ++i) {
      const uint32_t* const row =
          sequence.support.offsets.data() + span.offset + i;
      const auto first = sequence.support.tokens.begin();
      supports_[span.start + i].assign(first + row[0], first + row[1]);
    }
  }

  TokenSupport Flatten() const {
    TokenSupport support{.offsets = {0}, .tokens = {}};
    for (const std::vector<int32_t>& row : supports_) {
      support.tokens.insert(support.tokens.end(), row.begin(), row.end());
      support.offsets.push_back(static_cast<uint32_t>(support.tokens.size()));
    }
    return support;
  }

  void TakeRouting(const SampleRecord& record, const SequenceRecord& sequence,
                   const SampledSpan& span) {
    if (record.prompt_routing.empty()) return;
    const size_t width = record.prompt_routing.size() / record.num_prompt;
    if (datum_.routing.empty()) {
      datum_.routing.assign(datum_.tokens.size() * width, kRouterChooses);
    }
    // Row i of the datum is row i + shift of the record.
    const int64_t shift =
        static_cast<int64_t>(record.num_prompt) + span.offset - 1 - span.start;
    const auto copy = [&](size_t row) {
      const size_t from = (row + static_cast<size_t>(shift)) * width;
      const size_t prompt = record.prompt_routing.size();
      const uint16_t* const experts =
          from < prompt ? record.prompt_routing.data() + from
                        : sequence.routing.data() + (from - prompt);
      std::copy_n(experts, width,
                  datum_.routing.begin() + static_cast<int64_t>(row * width));
    };
    for (size_t row = span.start; row < span.start + span.length; ++row) {
      copy(row);
    }
    if (!IsContext(record, sequence, span)) return;
    for (size_t row = 0; row < span.start; ++row) {
      if (datum_.routing[row * width] == kRouterChooses) copy(row);
    }
  }

  // Returns whether the datum's tokens up to the span's first row are the
  // record's prompt and the tokens drawn before the span.
  bool IsContext(const SampleRecord& record, const SequenceRecord& sequence,
                 const SampledSpan& span) const {
    const std::vector<int32_t>& tokens = datum_.tokens;
    const size_t prompt = record.num_prompt;
    return prompt + span.offset == uint64_t{span.start} + 1 &&
           std::equal(sequence.tokens.begin(),
                      sequence.tokens.begin() + span.offset,
                      tokens.begin() + static_cast<int64_t>(prompt)) &&
           DigestOf(tokens.data(), prompt) == record.prompt_digest;
  }

  const Replay& replay_;
  const std::string path_;
  Datum& datum_;
  bool replaces_logprobs_ = false;  // The client sent none.
  std::vector<bool> has_logprob_;   // By target, if replaces_logprobs_.
  std::vector<std::vector<int32_t>> supports_;  // By target, or empty.
};

// Counts the span's tokens by the versions that drew them.
void Count(const SequenceRecord& sequence, const SampledSpan& span, bool own,
           Replayed* replayed) {
  replayed->tokens += span.length;
  if (!own) return;
  replayed->own_tokens += span.length;
  uint64_t begin = 0;
  for (const VersionSpan& drawing : sequence.versions) {
    const uint64_t end = begin + drawing.tokens;
    const uint64_t first = std::max<uint64_t>(begin, span.offset);
    const uint64_t last = std::min<uint64_t>(end, span.offset + span.length);
    if (first < last) replayed->versions += drawing.version * (last - first);
    begin = end;
  }
}

absl::Status RecordGone(const std::string& field, const SampledSpan& span) {
  return absl::FailedPreconditionError(absl::StrCat(
      field, ".sequence_id: there is no record of '", span.sequence_id,
      "': it was not used for a day, gave way to others "
      "(--sample-record-bytes), or the sample asked for none; send the values "
      "in the datum in place of the span"));
}

}  // namespace

std::string SequenceId(absl::string_view record, size_t index) {
  return absl::StrCat(record, ":", index);
}

std::optional<std::pair<std::string, size_t>> ParseSequenceId(
    absl::string_view sequence_id) {
  const size_t colon = sequence_id.rfind(':');
  size_t index = 0;
  if (colon == absl::string_view::npos ||
      !absl::SimpleAtoi(sequence_id.substr(colon + 1), &index)) {
    return std::nullopt;
  }
  return std::pair(std::string(sequence_id.substr(0, colon)), index);
}

SampleRecord RecordOf(const SampleRequest& request, AdapterKey adapter,
                      const SampleResult& result) {
  SampleRecord record{
      .tenant = request.tenant,
      .id = request.record,
      .adapter = adapter,
      .num_prompt = request.prompt.size(),
      .prompt_digest = DigestOf(request.prompt.data(), request.prompt.size()),
      .prompt_routing = {},
      .sequences = {}};
  // The samples share the rows of the prompt.
  const Sample& first = result.samples.front();
  const size_t rows = request.prompt.size() + first.tokens.size() - 1;
  const size_t width = first.routing.size() / rows;
  const size_t prompt = request.prompt.size() * width;
  record.prompt_routing.assign(
      first.routing.begin(),
      first.routing.begin() + static_cast<int64_t>(prompt));
  for (const Sample& sample : result.samples) {
    record.sequences.push_back(SequenceOf(sample, result.version, prompt));
  }
  return record;
}

absl::Status ReplaySamples(const FindRecord& find, AdapterKey adapter,
                           TrainRequest* request) {
  Replay replay = std::exchange(request->replay, {});
  if (!HasPolicy(request->loss.function)) replay.logprobs = false;
  // Data of a group come one after another, and name one record.
  std::pair<std::string, std::shared_ptr<const SampleRecord>> latest;
  for (size_t d = 0; d < replay.spans.size(); ++d) {
    if (replay.spans[d].empty()) continue;
    const std::string path = absl::StrCat("data[", d, "]");
    DatumReplay datum(replay, path, &request->data[d]);
    for (size_t s = 0; s < replay.spans[d].size(); ++s) {
      const SampledSpan& span = replay.spans[d][s];
      const std::string field = absl::StrCat("sampled_spans[", s, "]");
      const auto named = ParseSequenceId(span.sequence_id);
      if (named && (latest.second == nullptr || named->first != latest.first)) {
        latest = {named->first, find(request->tenant, named->first)};
      }
      const SampleRecord* const record = named ? latest.second.get() : nullptr;
      if (record == nullptr) {
        if (!replay.optional) {
          return RecordGone(absl::StrCat(path, ".", field), span);
        }
        ++request->replayed.missing;
        continue;
      }
      WEFT_RETURN_IF_ERROR(datum.Add(*record, named->second, span, field));
      Count(record->sequences[named->second], span, record->adapter == adapter,
            &request->replayed);
    }
    WEFT_RETURN_IF_ERROR(datum.Finish());
  }
  return absl::OkStatus();
}

}  // namespace weft
