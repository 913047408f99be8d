// Reads the JSON form of forward_backward's request, and converts its result to
// JSON (train_wire.h).
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/tinker/errors.h"
#include "server/tinker/model_input.h"
#include "server/tinker/tensor.h"
#include "server/tinker/train_wire.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

absl::Status ReadInputs(const Json& json, Datum* out) {
  WEFT_ASSIGN_OR_RETURN(const Json* const inputs,
                        ObjectField(json, "loss_fn_inputs"));
  for (const auto& [name, value] : inputs->items()) {
    WEFT_ASSIGN_OR_RETURN((*out->mutable_loss_fn_inputs())[name],
                          TensorFromJson(name, value));
  }
  return absl::OkStatus();
}

absl::Status ReadData(const Json& input, ForwardBackwardRequest* out) {
  const Json* const data = Find(input, "data");
  if (data == nullptr || !data->is_array()) {
    return BadField("data", "must be a list");
  }
  for (const Json& entry : *data) {
    if (!entry.is_object()) return BadField("data", "must have objects");
    Datum* const datum = out->add_data();
    WEFT_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                          ReadModelInput(entry, "model_input"));
    datum->add_model_input()->mutable_encoded_text()->set_tokens(
        tokens.data(), tokens.size() * sizeof(int32_t));
    WEFT_RETURN_IF_ERROR(ReadInputs(entry, datum));
  }
  return absl::OkStatus();
}

absl::Status ReadConfig(const Json& input, ForwardBackwardRequest* out) {
  if (Find(input, "loss_fn_config") == nullptr) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const Json* const config,
                        ObjectField(input, "loss_fn_config"));
  for (const auto& [name, value] : config->items()) {
    if (!value.is_number()) {
      return BadField(absl::StrCat("loss_fn_config.", Quoted(name)),
                      "must be a number");
    }
    (*out->mutable_loss_fn_config())[name] = value.get<double>();
  }
  return absl::OkStatus();
}

// Reads the number at `index` of an array of T in raw bytes.
template <typename T>
T At(const std::string& bytes, size_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

// Returns the part of `tensor` that belongs to datum `i` as JSON.
Json TensorJson(const BatchedTensor& tensor, size_t i) {
  const auto begin = At<int64_t>(tensor.offsets(), i);
  const auto end = At<int64_t>(tensor.offsets(), i + 1);
  Json data = Json::array();
  for (int64_t at = begin; at < end; at += sizeof(float)) {
    data.push_back(At<float>(tensor.data(), static_cast<size_t>(at) / 4));
  }
  Json shape = {static_cast<int64_t>(data.size())};
  for (const int64_t size : tensor.trailing_shape()) {
    shape[0] = shape[0].get<int64_t>() / size;
    shape.push_back(size);
  }
  return {{"data", data}, {"dtype", "float32"}, {"shape", shape}};
}

}  // namespace

absl::StatusOr<ForwardBackwardRequest> TrainFromJson(const Json& body) {
  ForwardBackwardRequest out;
  const char* const key = Find(body, "forward_input") != nullptr
                              ? "forward_input"
                              : "forward_backward_input";
  WEFT_ASSIGN_OR_RETURN(const Json* const input, ObjectField(body, key));
  WEFT_ASSIGN_OR_RETURN(*out.mutable_model_id(), StringField(body, "model_id"));
  WEFT_ASSIGN_OR_RETURN(const int64_t number, IntField(body, "seq_id"));
  if (number < 0 || number > std::numeric_limits<int32_t>::max()) {
    return BadField("seq_id", "must be in [0, 2147483648)");
  }
  out.set_seq_id(static_cast<int32_t>(number));
  out.set_forward_only(Find(body, "forward_input") != nullptr);
  WEFT_ASSIGN_OR_RETURN(*out.mutable_loss_fn(), StringField(*input, "loss_fn"));
  WEFT_RETURN_IF_ERROR(ReadData(*input, &out));
  WEFT_RETURN_IF_ERROR(ReadConfig(*input, &out));
  return out;
}

std::string TrainOutputJson(const std::string& serialized) {
  ForwardBackwardOutput output;
  output.ParseFromString(serialized);
  Json outputs = Json::array();
  for (const ArrayRecord& record : output.loss_fn_outputs()) {
    for (int64_t i = 0; i < record.num_datums(); ++i) {
      Json datum = Json::object();
      for (const auto& [name, tensor] : record.fields()) {
        datum[name] = TensorJson(tensor, static_cast<size_t>(i));
      }
      outputs.push_back(std::move(datum));
    }
  }
  Json metrics = Json::object();
  for (const auto& [name, value] : output.metrics()) metrics[name] = value;
  return JsonReply({{"loss_fn_output_type", output.loss_fn_output_type()},
                    {"loss_fn_outputs", std::move(outputs)},
                    {"metrics", std::move(metrics)}})
      .body;
}

}  // namespace weft::tinker
