#include "src/lora/base_copies.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "src/base/status_macros.h"
#include "src/weights/checkpoint.h"
#include "src/weights/float_convert.h"

namespace weft::lora {
namespace {

using weights::DiskTensor;
using weights::ScalarType;

constexpr char kHead[] = "lm_head.weight";
constexpr char kEmbedding[] = "model.embed_tokens.weight";
constexpr size_t kChunk = size_t{1} << 20;  // Elements.

// Returns the largest error of a value that was rounded to the nearest number
// of bf16 or f16. A model may have been loaded in such a dtype and its copies
// saved in a wider one, so the value says more than the copy's dtype.
float RoundingError(float copy, float base) {
  const uint32_t bits = std::bit_cast<uint32_t>(copy);
  if ((bits & 0xffff) == 0)
    return std::max(0x1p-8F * std::abs(base), 0x1p-134F);
  if ((bits & 0x1fff) == 0)
    return std::max(0x1p-11F * std::abs(base), 0x1p-25F);
  return 0;
}

absl::StatusOr<DiskTensor> FindBase(const weights::Checkpoint& checkpoint,
                                    const BaseCopy& copy) {
  absl::StatusOr<DiskTensor> found = checkpoint.Find(copy.base_name);
  if (absl::IsNotFound(found.status()) && copy.base_name == kHead) {
    found = checkpoint.Find(kEmbedding);
  }
  if (found.ok()) {
    if (absl::MakeConstSpan(copy.view.shape) == found->shape()) return found;
    return absl::InvalidArgumentError(absl::StrCat(
        weights::QuotedTensor(copy.name), " has shape ",
        weights::ShapeString(copy.view.shape), "; the base model's ",
        weights::ShapeString(found->shape())));
  }
  if (!absl::IsNotFound(found.status())) return found.status();
  return absl::InvalidArgumentError(absl::StrCat(
      weights::QuotedTensor(copy.name),
      " is a copy of a weight that the model folder does not have under this "
      "name, so it cannot be compared; remove it from the file"));
}

absl::Status Differs(const BaseCopy& copy, size_t row) {
  return absl::InvalidArgumentError(absl::StrCat(
      weights::QuotedTensor(copy.name), " differs from the base model's ",
      copy.base_name, ", first in row ", row,
      ". All adapters share one base model: put the changed rows into the "
      "model folder and serve that, or remove the tensor from the file to "
      "train on from the base's rows"));
}

absl::StatusOr<std::vector<float>> Floats(ScalarType dtype,
                                          absl::Span<const std::byte> bytes) {
  std::vector<float> values(bytes.size() / weights::ScalarTypeBytes(dtype));
  WEFT_RETURN_IF_ERROR(weights::CopyToFloats({.dtype = dtype, .bytes = bytes},
                                             absl::MakeSpan(values)));
  return values;
}

absl::Status CheckCopy(const BaseCopy& copy, const DiskTensor& base) {
  const size_t base_bytes = weights::ScalarTypeBytes(base.dtype());
  const size_t copy_bytes = weights::ScalarTypeBytes(copy.view.dtype);
  const size_t count = copy.view.num_elements();
  std::vector<std::byte> buffer;
  for (size_t first = 0; first < count; first += kChunk) {
    const size_t length = std::min(kChunk, count - first);
    buffer.resize(length * base_bytes);
    WEFT_RETURN_IF_ERROR(
        base.ReadBytes(first * base_bytes, absl::MakeSpan(buffer)));
    WEFT_ASSIGN_OR_RETURN(const std::vector<float> expected,
                          Floats(base.dtype(), buffer));
    WEFT_ASSIGN_OR_RETURN(
        const std::vector<float> actual,
        Floats(copy.view.dtype, copy.view.bytes.subspan(first * copy_bytes,
                                                        length * copy_bytes)));
    for (size_t i = 0; i < length; ++i) {
      // A NaN differs from everything.
      if (std::abs(actual[i] - expected[i]) <=
          RoundingError(actual[i], expected[i])) {
        continue;
      }
      return Differs(copy, (first + i) / copy.view.shape.back());
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckCopies(const std::vector<BaseCopy>& copies,
                         const std::string& model_dir) {
  if (copies.empty()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<weights::Checkpoint> checkpoint,
                        weights::Checkpoint::Open(model_dir));
  for (const BaseCopy& copy : copies) {
    WEFT_ASSIGN_OR_RETURN(const DiskTensor base, FindBase(*checkpoint, copy));
    WEFT_RETURN_IF_ERROR(CheckCopy(copy, base));
  }
  return absl::OkStatus();
}

}  // namespace weft::lora
