#include "src/weights/torch_pickle.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "src/base/status_macros.h"
#include "src/weights/pickle_machine.h"
#include "src/weights/pickle_values.h"

namespace weft::weights {
namespace {

enum class Callee : uint8_t { kOrderedDict, kTensor, kParameter, kStorage };

// A function or type that a pickle may name, and what the name stands for.
struct Global {
  absl::string_view module;
  absl::string_view name;
  Callee call = Callee::kStorage;
  ScalarType dtype = ScalarType::kF32;  // Dtype of the elements of a
                                        // kStorage.
};

constexpr Global kGlobals[] = {
    {"collections", "OrderedDict", Callee::kOrderedDict},
    {"torch._utils", "_rebuild_tensor_v2", Callee::kTensor},
    {"torch._utils", "_rebuild_parameter", Callee::kParameter},
    {"torch", "FloatStorage", Callee::kStorage, ScalarType::kF32},
    {"torch", "HalfStorage", Callee::kStorage, ScalarType::kF16},
    {"torch", "BFloat16Storage", Callee::kStorage, ScalarType::kBf16},
    {"torch", "DoubleStorage", Callee::kStorage, ScalarType::kF64},
    {"torch", "LongStorage", Callee::kStorage, ScalarType::kI64},
    {"torch", "IntStorage", Callee::kStorage, ScalarType::kI32},
    {"torch", "ShortStorage", Callee::kStorage, ScalarType::kI16},
    {"torch", "CharStorage", Callee::kStorage, ScalarType::kI8},
    {"torch", "ByteStorage", Callee::kStorage, ScalarType::kU8},
    {"torch", "BoolStorage", Callee::kStorage, ScalarType::kBool},
};

struct Storage {
  ScalarType dtype = ScalarType::kF32;
  absl::string_view key;
  uint64_t num_elements = 0;
};

absl::Status Refuse(absl::string_view why) {
  return absl::InvalidArgumentError(why);
}

bool HaveKinds(absl::Span<const PickleValue> values,
               absl::Span<const PickleKind> kinds) {
  return std::ranges::equal(values, kinds, {}, &PickleValue::kind);
}

// Accepts the names in kGlobals, and creates storages, tensors and
// OrderedDicts.
class TorchObjects final : public PickleObjects {
 public:
  explicit TorchObjects(PickleHeap& heap) : heap_(heap) {}

  absl::StatusOr<PickleValue> Global(absl::string_view module,
                                     absl::string_view name) override;
  absl::StatusOr<PickleValue> Persistent(const PickleValue& id) override;
  absl::StatusOr<PickleValue> Call(
      const PickleValue& function,
      absl::Span<const PickleValue> arguments) override;
  absl::Status SetState(const PickleValue& target,
                        const PickleValue& state) override;

  // Returns the tensors of a pickle's dict.
  [[nodiscard]] absl::StatusOr<PickledTensors> Tensors(
      const PickleValue& dict) const;

 private:
  absl::StatusOr<PickleValue> RebuildTensor(
      absl::Span<const PickleValue> arguments);
  absl::Status Sizes(const PickleValue& tuple,
                     std::vector<uint64_t>& sizes) const;

  PickleHeap& heap_;
  std::vector<Storage> storages_;
  std::vector<PickledTensor> tensors_;
};

absl::StatusOr<PickleValue> TorchObjects::Global(absl::string_view module,
                                                 absl::string_view name) {
  for (size_t i = 0; i < std::size(kGlobals); ++i) {
    if (kGlobals[i].module == module && kGlobals[i].name == name) {
      return PickleValue{.kind = PickleKind::kGlobal,
                         .number = static_cast<int64_t>(i)};
    }
  }
  return Refuse(absl::StrCat(
      "names '", absl::CHexEscape(module.substr(0, 64)), " ",
      absl::CHexEscape(name.substr(0, 64)),
      "', which is neither a dict nor a tensor of a type that is read"));
}

// Creates a storage. The id has the form ('storage', torch.FloatStorage, key,
// device, number of elements).
absl::StatusOr<PickleValue> TorchObjects::Persistent(const PickleValue& id) {
  constexpr PickleKind kKinds[] = {PickleKind::kString, PickleKind::kGlobal,
                                   PickleKind::kString, PickleKind::kString,
                                   PickleKind::kInt};
  const absl::Span<const PickleValue> parts =
      id.kind == PickleKind::kTuple ? heap_.Items(id)
                                    : absl::Span<const PickleValue>();
  if (!HaveKinds(parts, kKinds) || heap_.Text(parts[0]) != "storage" ||
      kGlobals[parts[1].number].call != Callee::kStorage ||
      parts[4].number < 0) {
    return Refuse("has an id that is not a storage's");
  }
  WEFT_RETURN_IF_ERROR(heap_.Charge(1));
  const auto index = static_cast<int64_t>(storages_.size());
  storages_.push_back({.dtype = kGlobals[parts[1].number].dtype,
                       .key = heap_.Text(parts[2]),
                       .num_elements = static_cast<uint64_t>(parts[4].number)});
  return PickleValue{.kind = PickleKind::kStorage, .number = index};
}

absl::StatusOr<PickleValue> TorchObjects::Call(
    const PickleValue& function, absl::Span<const PickleValue> arguments) {
  // The arguments have the form (tensor, requires_grad, hooks).
  constexpr PickleKind kParameterKinds[] = {
      PickleKind::kTensor, PickleKind::kBool, PickleKind::kDict};
  switch (kGlobals[function.number].call) {
    case Callee::kOrderedDict:
      if (arguments.empty()) return heap_.NewDict(/*ordered=*/true);
      return Refuse("calls OrderedDict with arguments");
    case Callee::kTensor:
      return RebuildTensor(arguments);
    case Callee::kParameter:
      if (HaveKinds(arguments, kParameterKinds)) return arguments[0];
      return Refuse("calls _rebuild_parameter with arguments of other kinds");
    case Callee::kStorage:
      break;
  }
  return Refuse("calls a storage type");
}

absl::Status TorchObjects::Sizes(const PickleValue& tuple,
                                 std::vector<uint64_t>& sizes) const {
  if (tuple.size > kMaxTensorRank) {
    return Refuse(absl::StrCat("makes a tensor of ", tuple.size,
                               " dimensions > ", kMaxTensorRank));
  }
  for (const PickleValue& item : heap_.Items(tuple)) {
    if (item.kind != PickleKind::kInt || item.number < 0) {
      return Refuse("makes a tensor whose size or stride is not an integer >= 0");
    }
    sizes.push_back(static_cast<uint64_t>(item.number));
  }
  return absl::OkStatus();
}

// Creates a tensor. The arguments have the form (storage, offset, size, stride,
// requires_grad, hooks[, metadata]). Refuses metadata other than None, because
// the metadata of conjugate and negative views changes the values.
absl::StatusOr<PickleValue> TorchObjects::RebuildTensor(
    absl::Span<const PickleValue> arguments) {
  constexpr PickleKind kKinds[] = {PickleKind::kStorage, PickleKind::kInt,
                                   PickleKind::kTuple,   PickleKind::kTuple,
                                   PickleKind::kBool,    PickleKind::kDict,
                                   PickleKind::kNone};
  const auto kinds = absl::MakeConstSpan(kKinds);
  if (!(HaveKinds(arguments, kinds) || HaveKinds(arguments, kinds.first(6))) ||
      arguments[1].number < 0 || arguments[2].size != arguments[3].size) {
    return Refuse("calls _rebuild_tensor_v2 with arguments of other kinds");
  }
  if (tensors_.size() == kMaxTensors) {
    return Refuse(absl::StrCat("makes more than ", kMaxTensors, " tensors"));
  }
  const Storage& storage = storages_[arguments[0].number];
  PickledTensor tensor = {.dtype = storage.dtype,
                          .storage = std::string(storage.key),
                          .storage_elements = storage.num_elements,
                          .offset = static_cast<uint64_t>(arguments[1].number)};
  WEFT_RETURN_IF_ERROR(Sizes(arguments[2], tensor.shape));
  WEFT_RETURN_IF_ERROR(Sizes(arguments[3], tensor.strides));
  const auto index = static_cast<int64_t>(tensors_.size());
  tensors_.push_back(std::move(tensor));
  return PickleValue{.kind = PickleKind::kTensor, .number = index};
}

// Accepts only the attribute _metadata of an OrderedDict. In this attribute,
// state_dict() keeps the versions of modules.
absl::Status TorchObjects::SetState(const PickleValue& target,
                                    const PickleValue& state) {
  if (target.kind != PickleKind::kDict || !heap_.Dict(target).ordered ||
      state.kind != PickleKind::kDict) {
    return Refuse("sets the state of something other than an OrderedDict");
  }
  for (const auto& [key, value] : heap_.Dict(state).entries) {
    if (heap_.Text(key) != "_metadata") {
      return Refuse(
          absl::StrCat("sets the attribute '",
                       absl::CHexEscape(heap_.Text(key).substr(0, 64)),
                       "'; only _metadata is known"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<PickledTensors> TorchObjects::Tensors(
    const PickleValue& dict) const {
  if (dict.kind != PickleKind::kDict) {
    return Refuse("pickle holds no dict of tensors");
  }
  PickledTensors result;
  for (const auto& [key, value] : heap_.Dict(dict).entries) {
    const absl::string_view name = heap_.Text(key);
    const std::string problem = TensorNameProblem(name);
    if (!problem.empty()) {
      return Refuse(absl::StrCat(QuotedTensor(name), " ", problem));
    }
    if (value.kind != PickleKind::kTensor) {
      return Refuse(absl::StrCat("pickle has '", absl::CHexEscape(name),
                                 "', which is not a tensor"));
    }
    if (result.size() == kMaxTensors) {
      return Refuse(
          absl::StrCat("pickle names more than ", kMaxTensors, " tensors"));
    }
    if (!result.emplace(name, tensors_[value.number]).second) {
      return Refuse(absl::StrCat(QuotedTensor(name), " is there twice"));
    }
  }
  return result;
}

}  // namespace

absl::StatusOr<PickledTensors> ParseTorchPickle(absl::string_view pickle) {
  if (pickle.size() > kMaxPickleBytes) {
    return Refuse(absl::StrCat("pickle has ", pickle.size(), " bytes > limit ",
                               kMaxPickleBytes));
  }
  PickleHeap heap(pickle);
  TorchObjects objects(heap);
  WEFT_ASSIGN_OR_RETURN(const PickleValue result,
                        PickleMachine(pickle, heap, objects).Run());
  return objects.Tensors(result);
}

}  // namespace weft::weights
