// Lists of the fields that decide what a step does. The log writes and reads
// the fields of a list (src/log/field_codec.h), and a step's digest hashes them
// (step.cc), so a field that is in a list is in both.
//
//   void Fields(const auto& f, Is<Teacher> auto& teacher) {
//     f("adapter_id", teacher.adapter_id);
//   }
//
// f(NAME, VALUE) is called for each field, with its name in log.proto. f.Raw is
// called for numbers that the log stores as an array of bytes, and f.OneOf for
// a variant. f.kReads says that f replaces the fields, in the order of the
// list, so a list may depend on fields that it has named before.
#ifndef WEFT_SRC_REQUEST_STEP_FIELDS_H_
#define WEFT_SRC_REQUEST_STEP_FIELDS_H_

#include <optional>
#include <string>
#include <type_traits>
#include <variant>

#include "src/request/step.h"

namespace weft {

// T is Plain or const Plain, so that one list serves for reading and writing.
template <typename T, typename Plain>
concept Is = std::is_same_v<std::remove_const_t<T>, Plain>;

template <typename T>
concept Scalar = std::is_arithmetic_v<T> || std::is_enum_v<T> ||
    std::is_same_v<T, std::string>;

void Fields(const auto& f, auto& name, Is<CustomInput> auto& input) {
  f("name", name);
  f("shape", input.shape);
  f("is_int", input.is_int);
  input.is_int ? f.Raw("values", input.ints) : f.Raw("values", input.floats);
}

void Fields(const auto& f, Is<Datum> auto& datum) {
  f.Raw("tokens", datum.tokens);
  f.Raw("targets", datum.targets);
  f.Raw("weights", datum.weights);
  f.Raw("logprobs", datum.logprobs);
  f.Raw("advantages", datum.advantages);
  f.Raw("target_offsets", datum.target_offsets);
  f("targets_per_token", datum.targets_per_token);
  f.Raw("routing", datum.routing);
  f.Raw("support_offsets", datum.support.offsets);
  f.Raw("support_tokens", datum.support.tokens);
  f("custom_inputs", datum.custom_inputs);
  f.Raw("teacher_tokens", datum.teacher_tokens);
  f("teacher_offset", datum.teacher_offset);
}

void Fields(const auto& f, Is<CustomLossInput> auto& input) {
  f("name", input.name);
  f("rank", input.rank);
}

void Fields(const auto& f, Is<Teacher> auto& teacher) {
  f("base_model", teacher.base_model);
  f("adapter_id", teacher.adapter_id);
  f("snapshot", teacher.snapshot);
}

void Fields(const auto& f, Is<LossConfig> auto& loss) {
  f("function", loss.function);
  f("clip_low", loss.clip_low);
  f("clip_high", loss.clip_high);
  f("beta", loss.beta);
  f("temperature", loss.temperature);
  f("return_entropy", loss.return_entropy);
  f("gradient_filter", loss.gradient_filter);
  f("score_all", loss.score_all);
  f("return_routing", loss.return_routing);
  f("custom_graph", loss.custom.graph);
  f("custom_inputs", loss.custom.inputs);
  if (HasTeacher(loss.function)) f("teacher", loss.teacher);
}

void Fields(const auto& f, Is<SampledSpan> auto& span) {
  f("sequence_id", span.sequence_id);
  f("offset", span.offset);
  f("start", span.start);
  f("length", span.length);
}

void Fields(const auto& f, Is<Replay> auto& replay) {
  f("routing", replay.routing);
  f("support", replay.support);
  f("logprobs", replay.logprobs);
  f("optional", replay.optional);
  f("spans", replay.spans);
}

void Fields(const auto& f, Is<Replayed> auto& replayed) {
  f("tokens", replayed.tokens);
  f("missing", replayed.missing);
  f("own_tokens", replayed.own_tokens);
  f("versions", replayed.versions);
}

// A request's list lacks adapter_id and step, which StepRequest's list has.

void Fields(const auto& f, Is<TrainRequest> auto& request) {
  f("backward", request.backward);
  Fields(f, request.loss);
  f("data", request.data);
  // The digest is of what the client asked for, and the log has what came of
  // it.
  if constexpr (std::decay_t<decltype(f)>::kDigests) {
    f("replay", request.replay);
  } else if (f.kReads || request.replayed != Replayed()) {
    f("replayed", request.replayed);
  }
}

void Fields(const auto& f, Is<OptimStepRequest> auto& request) {
  auto& adamw = request.adamw;
  f("learning_rate", adamw.learning_rate);
  f("beta1", adamw.beta1);
  f("beta2", adamw.beta2);
  f("eps", adamw.eps);
  f("weight_decay", adamw.weight_decay);
  f("max_grad_norm", adamw.max_grad_norm);
}

void Fields(const auto& f, Is<MuonConfig> auto& muon) {
  f("learning_rate", muon.learning_rate);
  f("momentum", muon.momentum);
  f("nesterov", muon.nesterov);
  f("weight_decay", muon.weight_decay);
  f("ns_steps", muon.ns_steps);
  f("max_grad_norm", muon.max_grad_norm);
}

// Stands for an OptimStepRequest that discards.
struct Discard {};
void Fields(const auto& /*f*/, Is<Discard> auto& /*discard*/) {}

void Fields(const auto& f, Is<SaveCheckpointRequest> auto& request) {
  f("name", request.name);
  f("overwrite", request.overwrite);
  f("kind", request.kind);
  f("metadata", request.metadata);
  f("ttl_seconds", request.ttl_seconds);
  f("keep_newest", request.keep_newest);
}

void Fields(const auto& f, Is<LoadCheckpointRequest> auto& request) {
  f("source_adapter_id", request.source_adapter_id);
  f("name", request.name);
  f("weights_only", request.weights_only);
  f("tenant", request.tenant);
}

void Fields(const auto& f, Is<PublishSnapshotRequest> auto& request) {
  f("name", request.name);
}

// Such a step keeps the digest of its payload, and the log has only its result.
void Fields(const auto& /*f*/, Is<RefusedStep> auto& /*request*/) {}

void Fields(const auto& f, Is<StepRequest> auto& request) {
  // OptimSteps with Muon, and those that discard, are kinds of their own in the
  // log.
  std::optional<MuonConfig> muon;
  std::optional<Discard> discard;
  if (const auto* optim = std::get_if<OptimStepRequest>(&request)) {
    muon = optim->muon;
    if (optim->discard) discard.emplace();
  }
  f("muon", muon);
  // Digests of other requests are as they were before there was this kind.
  if (f.kReads || discard) f("discard", discard);
  if (!muon && !discard) {
    f.OneOf({"train", "optim", "save", "load", "publish", nullptr}, request);
  } else if constexpr (std::decay_t<decltype(f)>::kReads) {
    request = OptimStepRequest{.muon = muon, .discard = discard.has_value()};
  }
  std::visit(
      [&f](auto& kind) {
        f("adapter_id", kind.adapter_id);
        if constexpr (!std::decay_t<decltype(f)>::kDigests)
          f("step", kind.step);
      },
      request);
}

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_STEP_FIELDS_H_
