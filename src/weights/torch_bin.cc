#include "src/weights/torch_bin.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "src/base/status_macros.h"
#include "src/weights/byte_reader.h"
#include "src/weights/pickle_machine.h"
#include "src/weights/zip_directory.h"

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
    {"torch", "BoolStorage", Callee::kStorage, ScalarType::kBool}};

struct Storage {
  ScalarType dtype = ScalarType::kF32;
  absl::string_view key;
  uint64_t num_elements = 0;
};

template <typename... Parts>
absl::Status Refuse(const Parts&... why) {
  return absl::InvalidArgumentError(absl::StrCat(why...));
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
  absl::StatusOr<PickledTensors> Tensors(const PickleValue& dict) const;

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
  return Refuse(
      "names '", absl::CHexEscape(module.substr(0, 64)), " ",
      absl::CHexEscape(name.substr(0, 64)),
      "', which is neither a dict nor a tensor of a type that is read");
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
    return Refuse("makes a tensor of ", tuple.size, " dimensions > ",
                  kMaxTensorRank);
  }
  for (const PickleValue& item : heap_.Items(tuple)) {
    if (item.kind != PickleKind::kInt || item.number < 0) {
      return Refuse(
          "makes a tensor whose size or stride is not an integer >= 0");
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
    return Refuse("makes more than ", kMaxTensors, " tensors");
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
      return Refuse("sets the attribute '",
                    absl::CHexEscape(heap_.Text(key).substr(0, 64)),
                    "'; only _metadata is known");
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
      return Refuse(QuotedTensor(name), " ", problem);
    }
    if (value.kind != PickleKind::kTensor) {
      return Refuse("pickle has '", absl::CHexEscape(name),
                    "', which is not a tensor");
    }
    if (result.size() == kMaxTensors) {
      return Refuse("pickle names more than ", kMaxTensors, " tensors");
    }
    if (!result.emplace(name, tensors_[value.number]).second) {
      return Refuse(QuotedTensor(name), " is there twice");
    }
  }
  return result;
}

static_assert(std::endian::native == std::endian::little,
              "tensors are read as they lie, and archives are little-endian");

constexpr absl::string_view kPickleName = "/data.pkl";
constexpr uint32_t kZipSignature = 0x04034b50;
constexpr uint32_t kPickleStart = 0x80;
constexpr size_t kMaxByteOrderBytes = 16;
// Offset of a tar archive's magic. torch wrote tar archives before version 0.1.
constexpr size_t kTarMagicOffset = 257;

// Refuses a file that is not a zip archive. If the file has torch's old format,
// the message says so.
absl::Status CheckIsZip(const RegularFile& file) {
  WEFT_ASSIGN_OR_RETURN(
      const std::string start,
      file.ReadBytes(
          0, std::min<uint64_t>(file.size_bytes(), kTarMagicOffset + 5)));
  const uint32_t signature = ByteReader(start).U32();
  if (signature == kZipSignature) return absl::OkStatus();
  const bool is_tar = start.ends_with("ustar");
  if (is_tar || (signature & 0xff) == kPickleStart) {
    return absl::UnimplementedError(absl::StrCat(
        "is in torch's old format (a ", is_tar ? "tar archive" : "bare pickle",
        "); load it with torch and torch.save it again"));
  }
  return absl::InvalidArgumentError("is not a zip archive of torch.save");
}

// Returns the only folder of the archive that has a data.pkl.
absl::StatusOr<std::string> FindRoot(const ZipDirectory& zip) {
  std::string root;
  for (const auto& [name, entry] : zip) {
    absl::string_view folder = name;
    if (!absl::ConsumeSuffix(&folder, kPickleName)) continue;
    if (!root.empty() || folder.empty()) {
      return absl::InvalidArgumentError(
          "zip archive has data.pkl twice, or outside of a folder");
    }
    root = std::string(folder);
  }
  if (root.empty()) {
    return absl::InvalidArgumentError(
        "zip archive has no data.pkl: torch.save did not write it");
  }
  return root;
}

// Reads a whole entry and verifies its checksum.
absl::StatusOr<std::string> ReadEntry(const RegularFile& file,
                                      absl::string_view name,
                                      const ZipEntry& entry,
                                      uint64_t max_bytes) {
  if (entry.size_bytes > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("zip entry '", absl::CHexEscape(name), "' has ",
                     entry.size_bytes, " bytes > limit ", max_bytes));
  }
  WEFT_ASSIGN_OR_RETURN(std::string bytes,
                        file.ReadBytes(entry.data_offset, entry.size_bytes));
  // torch writes 0 if it is configured to skip checksums.
  if (entry.crc32 != 0 && Crc32(bytes) != entry.crc32) {
    return absl::DataLossError(absl::StrCat(
        "zip entry '", absl::CHexEscape(name), "' fails its checksum"));
  }
  return bytes;
}

absl::Status CheckByteOrder(const RegularFile& file, const ZipDirectory& zip,
                            const std::string& root) {
  const auto entry = zip.find(absl::StrCat(root, "/byteorder"));
  if (entry == zip.end()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(
      const std::string order,
      ReadEntry(file, entry->first, entry->second, kMaxByteOrderBytes));
  if (order == "little") return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "zip archive has byteorder '", absl::CHexEscape(order), "', not little"));
}

// Computes from shape, strides and offset whether the tensor is inside its
// storage. The computation never overflows.
bool LiesInStorage(const PickledTensor& tensor) {
  uint64_t last = tensor.offset;
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    if (tensor.shape[i] == 0) return tensor.offset <= tensor.storage_elements;
    uint64_t span = 0;
    if (__builtin_mul_overflow(tensor.shape[i] - 1, tensor.strides[i], &span) ||
        __builtin_add_overflow(last, span, &last)) {
      return false;
    }
  }
  return last < tensor.storage_elements;
}

// Returns whether the tensor is row-major. Ignores the strides of dimensions of
// size 1, and all strides of an empty tensor.
bool IsRowMajor(const PickledTensor& tensor) {
  if (std::ranges::count(tensor.shape, 0u) > 0) return true;
  uint64_t stride = 1;
  for (size_t i = tensor.shape.size(); i > 0; --i) {
    const uint64_t size = tensor.shape[i - 1];
    if (size != 1 && tensor.strides[i - 1] != stride) return false;
    stride *= size;
  }
  return true;
}

// Checks that the tensor is inside its storage, and returns its place in the
// file.
absl::StatusOr<StoredTensor> Locate(const std::string& name,
                                    const PickledTensor& tensor,
                                    const ZipDirectory& zip,
                                    const std::string& root) {
  const auto record = zip.find(absl::StrCat(root, "/data/", tensor.storage));
  if (record == zip.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        QuotedTensor(name), " is in storage '",
        absl::CHexEscape(tensor.storage.substr(0, 64)), "', which is missing"));
  }
  const ZipEntry& entry = record->second;
  const uint64_t element_bytes = ScalarTypeBytes(tensor.dtype);
  uint64_t storage_bytes = 0;
  if (__builtin_mul_overflow(tensor.storage_elements, element_bytes,
                             &storage_bytes) ||
      storage_bytes != entry.size_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        QuotedTensor(name), " is in a storage of ", tensor.storage_elements,
        " elements of ", element_bytes, " bytes, whose zip entry has ",
        entry.size_bytes, " bytes"));
  }
  WEFT_ASSIGN_OR_RETURN(const uint64_t bytes,
                        DeclaredBytes(name, tensor.dtype, tensor.shape));
  if (!LiesInStorage(tensor)) {
    return absl::InvalidArgumentError(
        absl::StrCat(QuotedTensor(name), " reaches beyond the ",
                     tensor.storage_elements, " elements of its storage"));
  }
  return StoredTensor{
      .dtype = tensor.dtype,
      .shape = std::vector<int64_t>(tensor.shape.begin(), tensor.shape.end()),
      .offset = entry.data_offset + tensor.offset * element_bytes,
      .size_bytes = bytes,
      .row_major = IsRowMajor(tensor)};
}

}  // namespace

absl::StatusOr<PickledTensors> ParseTorchPickle(absl::string_view pickle) {
  if (pickle.size() > kMaxPickleBytes) {
    return Refuse("pickle has ", pickle.size(), " bytes > limit ",
                  kMaxPickleBytes);
  }
  PickleHeap heap(pickle);
  TorchObjects objects(heap);
  WEFT_ASSIGN_OR_RETURN(const PickleValue result,
                        PickleMachine(pickle, heap, objects).Run());
  return objects.Tensors(result);
}

absl::StatusOr<TensorDirectory> ReadTorchDirectory(const RegularFile& file) {
  WEFT_RETURN_IF_ERROR(CheckIsZip(file));
  WEFT_ASSIGN_OR_RETURN(const ZipDirectory zip, ReadZipDirectory(file));
  WEFT_ASSIGN_OR_RETURN(const std::string root, FindRoot(zip));
  WEFT_RETURN_IF_ERROR(CheckByteOrder(file, zip, root));
  const std::string pickle_name = absl::StrCat(root, kPickleName);
  WEFT_ASSIGN_OR_RETURN(
      const std::string pickle,
      ReadEntry(file, pickle_name, zip.at(pickle_name), kMaxPickleBytes));
  WEFT_ASSIGN_OR_RETURN(const PickledTensors pickled, ParseTorchPickle(pickle));
  TensorDirectory tensors;
  for (const auto& [name, tensor] : pickled) {
    WEFT_ASSIGN_OR_RETURN(StoredTensor stored, Locate(name, tensor, zip, root));
    tensors.emplace(name, std::move(stored));
  }
  return tensors;
}

}  // namespace weft::weights
