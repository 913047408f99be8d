#include "server/wire/custom_loss_reader.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/wire/field_checks.h"
#include "src/base/status_macros.h"
#include "src/request/field_names.h"
#include "src/request/loss_graph.h"

namespace weft::server {
namespace {

template <typename T>
absl::Status CopyValues(absl::string_view path, const std::string& raw,
                        uint64_t expected, std::vector<T>* out) {
  if (raw.size() % sizeof(T) != 0 || raw.size() / sizeof(T) != expected) {
    return BadField(path, "has ", raw.size(), " bytes, must have ", expected,
                    " values of ", sizeof(T), " bytes, as its shape says");
  }
  out->resize(raw.size() / sizeof(T));
  if (!raw.empty()) std::memcpy(out->data(), raw.data(), raw.size());
  return absl::OkStatus();
}

absl::StatusOr<CustomInput> ReadInput(const std::string& path,
                                      const v1::CustomInput& in, int rank) {
  if (in.shape_size() != rank) {
    return BadField(absl::StrCat(path, ".shape"), "has ", in.shape_size(),
                    " dimensions, must have ", rank, " as in ",
                    NameOfField("loss.custom_loss.inputs"));
  }
  if (!in.floats_le().empty() && !in.ints_le().empty()) {
    return BadField(absl::StrCat(path, ".floats_le"),
                    "and ints_le are both set, must be one of them");
  }
  CustomInput out;
  uint64_t expected = 1;  // At most two factors of 32 bits.
  for (const uint32_t size : in.shape()) {
    expected *= size;
    out.shape.push_back(size);
  }
  out.is_int = !in.ints_le().empty();
  WEFT_RETURN_IF_ERROR(out.is_int
                           ? CopyValues(absl::StrCat(path, ".ints_le"),
                                        in.ints_le(), expected, &out.ints)
                           : CopyValues(absl::StrCat(path, ".floats_le"),
                                        in.floats_le(), expected, &out.floats));
  return out;
}

// Returns an error unless the datum's targets have the rank of logprobs, and
// all are scored.
absl::Status CheckTargets(const std::string& path, const CustomLoss& loss,
                          const Datum& datum) {
  const bool matrix = loss.inputs.front().rank == 2;
  if (matrix != (datum.targets_per_token > 0)) {
    return BadField(absl::StrCat(path, ".targets_per_token"), "is ",
                    datum.targets_per_token, ", must be ",
                    matrix ? "above 0" : "0", ", because logprobs has rank ",
                    loss.inputs.front().rank, " in ",
                    NameOfField("loss.custom_loss.inputs"));
  }
  if (datum.weights.empty()) return absl::OkStatus();
  return BadField(absl::StrCat(path, ".weights"), "has ", datum.weights.size(),
                  " values, must be empty for the loss custom, "
                  "which scores every target: send them in "
                  "custom_inputs, and have the graph use them");
}

}  // namespace

absl::Status ReadCustomLoss(const v1::LossConfig& in, int num_data,
                            LossConfig* out) {
  if (out->function != LossFunction::kCustom) {
    if (!in.has_custom_loss()) return absl::OkStatus();
    return BadField("loss.custom_loss",
                    "is set, must be absent for every function but custom");
  }
  if (!in.has_custom_loss()) {
    return BadField("loss.custom_loss", "is required by the function custom");
  }
  out->custom.graph = in.custom_loss().graph();
  for (const v1::CustomLossInput& input : in.custom_loss().inputs()) {
    constexpr uint32_t kTooMany = 3;
    out->custom.inputs.push_back(
        {.name = input.name(),
         .rank = static_cast<int>(std::min(input.rank(), kTooMany))});
  }
  WEFT_ASSIGN_OR_RETURN(const LossGraph graph, ReadLossGraph(out->custom));
  const int64_t work = graph.num_calls();
  out->custom.num_calls = work;
  if (work * num_data <= kMaxNodeRuns) return absl::OkStatus();
  return BadField("data", "has ", num_data, " sequences, must be at most ",
                  kMaxNodeRuns / work, " for the ", work,
                  " nodes and items of lists of ",
                  NameOfField("loss.custom_loss.graph"), ": split it");
}

absl::Status ReadCustomInputs(const v1::Datum& in, int index,
                              const LossConfig& config, Datum* out) {
  const std::string path = absl::StrCat("data[", index, "]");
  if (config.function != LossFunction::kCustom) {
    if (in.custom_inputs().empty()) return absl::OkStatus();
    return BadField(absl::StrCat(path, ".custom_inputs"),
                    "is set, must be empty for every loss but custom");
  }
  WEFT_RETURN_IF_ERROR(CheckTargets(path, config.custom, *out));
  const std::vector<CustomLossInput>& inputs = config.custom.inputs;
  for (size_t i = 1; i < inputs.size(); ++i) {
    const std::string at =
        absl::StrCat(path, ".custom_inputs[", inputs[i].name, "]");
    const auto found = in.custom_inputs().find(inputs[i].name);
    if (found == in.custom_inputs().end()) {
      return BadField(at,
                      "is required: ", NameOfField("loss.custom_loss.inputs"),
                      " names it");
    }
    WEFT_ASSIGN_OR_RETURN(out->custom_inputs[inputs[i].name],
                          ReadInput(at, found->second, inputs[i].rank));
  }
  if (out->custom_inputs.size() == in.custom_inputs().size()) {
    return absl::OkStatus();
  }
  for (const auto& [name, value] : in.custom_inputs()) {
    if (out->custom_inputs.contains(name)) continue;
    return BadField(absl::StrCat(path, ".custom_inputs[", Quoted(name), "]"),
                    "is not an input of the loss: ",
                    NameOfField("loss.custom_loss.inputs"), " lists those");
  }
  return absl::OkStatus();
}

}  // namespace weft::server
