#include "src/request/sample_record.h"

#include <algorithm>
#include <limits>
#include <map>

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
  DatumReplay(const Replay& replay, double temperature, std::string path,
              Datum* datum)
      : replay_(replay),
        temperature_(temperature),
        path_(std::move(path)),
        datum_(*datum) {
    replaces_logprobs_ = replay.logprobs && datum_.logprobs.empty();
    if (replaces_logprobs_) {
      datum_.logprobs.assign(datum_.targets.size(), 0.0F);
      has_logprob_.assign(datum_.targets.size(), false);
    }
  }

  // Adds span `number`, which `field` names in errors. The spans come in any
  // order, but those of a record ascend.
  absl::Status Add(const SampleRecord& record, size_t index,
                   const SampledSpan& span, size_t number) {
    const std::string field = FieldOf(number);
    if (index >= record.sequences.size()) {
      return Bad(field, "sequence_id is '", span.sequence_id,
                 "', but the record has ", record.sequences.size(),
                 " sequences");
    }
    const SequenceRecord& sequence = record.sequences[index];
    WEFT_RETURN_IF_ERROR(CheckTokens(sequence, span, field));
    WEFT_RETURN_IF_ERROR(CheckDraws(record, sequence, span, field));
    if (replay_.logprobs) TakeLogprobs(sequence, span);
    if (replay_.support) TakeSupport(sequence, span, number);
    if (replay_.routing) TakeRouting(record, sequence, span);
    return absl::OkStatus();
  }

  static std::string FieldOf(size_t number) {
    return absl::StrCat("sampled_spans[", number, "]");
  }

  // Call it after the last span.
  absl::Status Finish() {
    if (!supports_.empty()) datum_.support = Flatten();
    supports_.clear();
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
  template <typename... Parts>
  absl::Status Bad(const std::string& field, const Parts&... problem) const {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ".", field, ".", problem...));
  }

  absl::Status CheckTokens(const SequenceRecord& sequence,
                           const SampledSpan& span,
                           const std::string& field) const {
    const uint64_t end = uint64_t{span.offset} + span.length;
    if (end > sequence.tokens.size()) {
      return Bad(field, "length is ", span.length, " at offset ", span.offset,
                 ", but '", span.sequence_id, "' has ", sequence.tokens.size(),
                 " drawn tokens");
    }
    for (uint32_t i = 0; i < span.length; ++i) {
      const int32_t target = datum_.targets[span.start + i];
      const int32_t drawn = sequence.tokens[span.offset + i];
      if (target == drawn) continue;
      return Bad(field, "start covers targets[", span.start + i, "] = ", target,
                 ", but token ", span.offset + i, " of '", span.sequence_id,
                 "' is ", drawn, ": name only what was drawn");
    }
    for (uint32_t i = 1; i < span.length; ++i) {
      if (datum_.tokens[span.start + i] == datum_.targets[span.start + i - 1]) {
        continue;
      }
      return Bad(field, "start covers tokens[", span.start + i,
                 "], which is not the target before it");
    }
    return absl::OkStatus();
  }

  // Checks that the loss has the distribution of the draws, as far as the
  // switches take something of it.
  absl::Status CheckDraws(const SampleRecord& record,
                          const SequenceRecord& sequence,
                          const SampledSpan& span,
                          const std::string& field) const {
    const bool truncated = !sequence.support.offsets.empty();
    const bool takes = replay_.logprobs || (replay_.support && truncated);
    if (replay_.optional || !takes) return absl::OkStatus();
    const std::string what = absl::StrCat("sequence_id is '", span.sequence_id,
                                          "', which was drawn ");
    if (record.edited) {
      return Bad(field, what,
                 "with penalties or logit_bias, which "
                 "training does not repeat: sample "
                 "without them, or leave the span out");
    }
    if (record.temperature != temperature_) {
      return Bad(field, what, "at temperature ", record.temperature,
                 ", but loss.temperature is ", temperature_,
                 ": set it to the sample's");
    }
    if (truncated && !replay_.support && datum_.support.offsets.empty()) {
      return Bad(field, what,
                 "from a truncated distribution, whose "
                 "logprobs are not those of the whole "
                 "vocabulary: set replay_support");
    }
    return absl::OkStatus();
  }

  void TakeLogprobs(const SequenceRecord& sequence, const SampledSpan& span) {
    std::copy_n(sequence.logprobs.begin() + span.offset, span.length,
                datum_.logprobs.begin() + span.start);
    if (!replaces_logprobs_) return;
    std::fill_n(has_logprob_.begin() + span.start, span.length, true);
  }

  void TakeSupport(const SequenceRecord& sequence, const SampledSpan& span,
                   size_t number) {
    if (sequence.support.offsets.empty()) return;
    const auto rows = sequence.support.offsets.begin() + span.offset;
    const auto first = sequence.support.tokens.begin();
    SpanSupport& to = supports_[number];
    to.start = span.start;
    to.rows.offsets.assign(rows, rows + span.length + 1);
    to.rows.tokens.assign(first + rows[0], first + rows[span.length]);
  }

  TokenSupport Flatten() const {
    TokenSupport all{.offsets = {0}, .tokens = {}};
    size_t num_ids = 0;
    for (const auto& [number, span] : supports_) {
      num_ids += span.rows.tokens.size();
    }
    all.offsets.reserve(datum_.targets.size() + 1);
    all.tokens.reserve(num_ids);
    for (const auto& [number, span] : supports_) {
      const auto before = static_cast<uint32_t>(all.tokens.size());
      all.offsets.resize(span.start + 1, before);
      const std::vector<uint32_t>& offsets = span.rows.offsets;
      for (size_t i = 1; i < offsets.size(); ++i) {
        all.offsets.push_back(before + offsets[i] - offsets[0]);
      }
      all.tokens.insert(all.tokens.end(), span.rows.tokens.begin(),
                        span.rows.tokens.end());
    }
    all.offsets.resize(datum_.targets.size() + 1,
                       static_cast<uint32_t>(all.tokens.size()));
    return all;
  }

  void TakeRouting(const SampleRecord& record, const SequenceRecord& sequence,
                   const SampledSpan& span) {
    if (record.prompt_routing.empty()) return;
    const size_t width = record.prompt_routing.size() / record.num_prompt;
    if (datum_.routing.empty()) {
      datum_.routing.assign(datum_.tokens.size() * width, kRouterChooses);
      giver_.assign(datum_.tokens.size(), std::numeric_limits<uint32_t>::max());
    }
    // Row i of the datum is row i + shift of the record.
    const int64_t shift =
        static_cast<int64_t>(record.num_prompt) + span.offset - 1 - span.start;
    const auto copy = [&](uint32_t row, uint32_t giver) {
      giver_[row] = giver;
      const size_t from = (row + static_cast<size_t>(shift)) * width;
      const size_t prompt = record.prompt_routing.size();
      const uint16_t* const experts =
          from < prompt ? record.prompt_routing.data() + from
                        : sequence.routing.data() + (from - prompt);
      std::copy_n(experts, width,
                  datum_.routing.begin() + static_cast<int64_t>(row * width));
    };
    for (uint32_t row = span.start; row < span.start + span.length; ++row) {
      copy(row, row);
    }
    if (!IsContext(record, sequence, span)) return;
    // An earlier span has given all rows before it, if it was context.
    const uint32_t first = span.start >= context_ ? context_ : 0;
    for (uint32_t row = first; row < span.start; ++row) {
      if (giver_[row] > span.start) copy(row, span.start);
    }
    context_ = std::max(context_, span.start);
  }

  // Returns whether the datum's tokens up to the span's first row are the
  // record's prompt and the tokens drawn before the span.
  bool IsContext(const SampleRecord& record, const SequenceRecord& sequence,
                 const SampledSpan& span) {
    const std::vector<int32_t>& tokens = datum_.tokens;
    const size_t prompt = record.num_prompt;
    return prompt + span.offset == uint64_t{span.start} + 1 &&
           std::equal(sequence.tokens.begin(),
                      sequence.tokens.begin() + span.offset,
                      tokens.begin() + static_cast<int64_t>(prompt)) &&
           PrefixDigest(prompt) == record.prompt_digest;
  }

  // Returns the digest of the first `count` tokens.
  const std::string& PrefixDigest(size_t count) {
    if (prefix_.second.empty() || prefix_.first != count) {
      prefix_ = {count, DigestOf(datum_.tokens.data(), count)};
    }
    return prefix_.second;
  }

  // The supports of a span's targets.
  struct SpanSupport {
    uint32_t start = 0;
    TokenSupport rows;  // The first offset may be any.
  };

  const Replay& replay_;
  const double temperature_;  // The loss's.
  const std::string path_;
  Datum& datum_;
  bool replaces_logprobs_ = false;          // The client sent none.
  std::vector<bool> has_logprob_;           // By target, if replaces_logprobs_.
  std::map<size_t, SpanSupport> supports_;  // By the number of the span.
  // By row of the experts: the first row of the span that gave them, or the row
  // itself if it is in a span. The nearest giver counts.
  std::vector<uint32_t> giver_;
  uint32_t context_ = 0;  // All rows before it have been given.
  std::pair<size_t, std::string> prefix_;  // The latest PrefixDigest.
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

std::string PathOf(size_t datum) { return absl::StrCat("data[", datum, "]"); }

absl::Status RecordGone(size_t datum, size_t number, const SampledSpan& span) {
  return absl::FailedPreconditionError(absl::StrCat(
      PathOf(datum), ".", DatumReplay::FieldOf(number),
      ".sequence_id: there is no record of '", span.sequence_id,
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
      .temperature =
          request.config.temperature == 0 ? 1 : request.config.temperature,
      .edited =
          request.config.has_penalties() || !request.config.logit_bias.empty(),
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
  std::vector<std::optional<DatumReplay>> data(replay.spans.size());
  // The spans of each record, as indices of datum and span.
  std::map<std::string, std::vector<std::pair<size_t, size_t>>> by_record;
  for (size_t d = 0; d < replay.spans.size(); ++d) {
    if (replay.spans[d].empty()) continue;
    data[d].emplace(replay, request->loss.temperature, PathOf(d),
                    &request->data[d]);
    for (size_t s = 0; s < replay.spans[d].size(); ++s) {
      const SampledSpan& span = replay.spans[d][s];
      const auto named = ParseSequenceId(span.sequence_id);
      by_record[named ? named->first : ""].emplace_back(d, s);
    }
  }
  for (const auto& [id, places] : by_record) {
    const std::shared_ptr<const SampleRecord> record =
        id.empty() ? nullptr : find(request->tenant, id);
    for (const auto& [d, s] : places) {
      const SampledSpan& span = replay.spans[d][s];
      if (record == nullptr) {
        if (!replay.optional) return RecordGone(d, s, span);
        ++request->replayed.missing;
        continue;
      }
      const size_t index = ParseSequenceId(span.sequence_id)->second;
      WEFT_RETURN_IF_ERROR(data[d]->Add(*record, index, span, s));
      Count(record->sequences[index], span, record->adapter == adapter,
            &request->replayed);
    }
  }
  for (std::optional<DatumReplay>& datum : data) {
    if (datum) WEFT_RETURN_IF_ERROR(datum->Finish());
  }
  return absl::OkStatus();
}

}  // namespace weft
