#include "server/wire/replay_validation.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "server/wire/field_checks.h"
#include "src/base/status_macros.h"

namespace weft::server {
namespace {

constexpr size_t kMaxSequenceIdBytes = 512;
constexpr int kMaxSpans = 1024;

absl::Status CheckSequenceId(const std::string& path, const std::string& id) {
  if (!id.empty() && id.size() <= kMaxSequenceIdBytes &&
      std::ranges::all_of(id, absl::ascii_isgraph)) {
    return absl::OkStatus();
  }
  return BadField(absl::StrCat(path, ".sequence_id"), "is ", Quoted(id),
                  ", must be a Sample.sequence_id: 1 to ", kMaxSequenceIdBytes,
                  " visible characters");
}

// Returns whether the span goes on where the one before ends, in the datum and
// in the sample.
bool Continues(const SampledSpan& before, const v1::SampledSpan& span) {
  return before.sequence_id == span.sequence_id() &&
         before.start + before.length == span.start() &&
         uint64_t{before.offset} + before.length == span.offset();
}

// Checks that data[index] can have spans.
absl::Status CheckSpanOwner(const Datum& datum, const v1::Datum& in, int index,
                            const Replay& replay) {
  const std::string path = absl::StrCat("data[", index, "].");
  if (in.sampled_spans_size() > kMaxSpans) {
    return BadField(absl::StrCat(path, "sampled_spans"), "has ",
                    in.sampled_spans_size(), " values, must be at most ",
                    kMaxSpans);
  }
  if (datum.targets_per_token > 1 || !datum.target_offsets.empty()) {
    return BadField(absl::StrCat(path, "sampled_spans"),
                    "is set, but tokens have several targets: a sample draws "
                    "one token at a time");
  }
  if (replay.routing && !in.routing_le().empty()) {
    return BadField(absl::StrCat(path, "routing_le"),
                    "is set, but loss.replay_routing replaces it: set one");
  }
  if (replay.support && !in.support_offsets_le().empty()) {
    return BadField(absl::StrCat(path, "support_offsets_le"),
                    "is set, but loss.replay_support replaces it: set one");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<SampledSpan>> ReadSampledSpans(const v1::Datum& in,
                                                          int index,
                                                          int64_t num_tokens) {
  std::vector<SampledSpan> spans;
  uint64_t free = 0;  // The first target that no span has.
  for (int s = 0; s < in.sampled_spans_size(); ++s) {
    const v1::SampledSpan& span = in.sampled_spans(s);
    const std::string path =
        absl::StrCat("data[", index, "].sampled_spans[", s, "]");
    WEFT_RETURN_IF_ERROR(CheckSequenceId(path, span.sequence_id()));
    if (span.start() < free) {
      return BadField(absl::StrCat(path, ".start"), "is ", span.start(),
                      ", must be at least ", free,
                      ", the end of the span before");
    }
    const uint64_t end = uint64_t{span.start()} + span.length();
    if (span.length() == 0 || end > static_cast<uint64_t>(num_tokens)) {
      return BadField(absl::StrCat(path, ".length"), "is ", span.length(),
                      " at start ", span.start(),
                      ", must be at least 1 and end within the ", num_tokens,
                      " targets");
    }
    if (!spans.empty() && Continues(spans.back(), span)) {
      return BadField(path,
                      "continues the span before, in the datum and in the "
                      "sample: join it with that one");
    }
    free = end;
    spans.push_back({.sequence_id = span.sequence_id(),
                     .offset = span.offset(),
                     .start = span.start(),
                     .length = span.length()});
  }
  return spans;
}

}  // namespace

absl::Status ReadReplay(
    const google::protobuf::RepeatedPtrField<v1::Datum>& data,
    const v1::LossConfig& loss, const RequestLimits& limits,
    TrainRequest* out) {
  Replay& replay = out->replay;
  replay.routing = loss.replay_routing();
  replay.support = loss.replay_support();
  replay.logprobs = loss.replay_logprobs();
  if (replay.support && HasTeacher(out->loss.function)) {
    return BadField("loss.replay_support",
                    "is set, but losses with a teacher compare distributions "
                    "over the whole vocabulary: leave it out");
  }
  const bool replays = replay.routing || replay.support || replay.logprobs;
  WEFT_RETURN_IF_ERROR(
      CheckRouting("loss.replay_routing", replay.routing, limits));
  for (int i = 0; i < data.size(); ++i) {
    if (data[i].sampled_spans_size() == 0) continue;
    const Datum& datum = out->data[static_cast<size_t>(i)];
    if (!replays) {
      return BadField(absl::StrCat("data[", i, "].sampled_spans"),
                      "is set, but no switch of loss uses it: set "
                      "replay_routing, replay_support or replay_logprobs");
    }
    if (!replay.logprobs && datum.logprobs.empty() &&
        HasPolicy(out->loss.function)) {
      return BadField(absl::StrCat("data[", i, "].logprobs"),
                      "is empty: send it, or set loss.replay_logprobs");
    }
    WEFT_RETURN_IF_ERROR(CheckSpanOwner(datum, data[i], i, replay));
    replay.spans.resize(out->data.size());
    WEFT_ASSIGN_OR_RETURN(replay.spans[static_cast<size_t>(i)],
                          ReadSampledSpans(data[i], i, datum.num_tokens()));
  }
  if (!replays || !replay.spans.empty()) return absl::OkStatus();
  return BadField(replay.routing   ? "loss.replay_routing"
                  : replay.support ? "loss.replay_support"
                                   : "loss.replay_logprobs",
                  "is set, but no datum has sampled_spans");
}

}  // namespace weft::server
