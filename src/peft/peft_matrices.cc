#include "src/peft/peft_matrices.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "src/base/status_macros.h"
#include "src/weights/float_convert.h"

namespace weft::lora {
namespace {

using weights::ScalarType;
using weights::TensorMap;
using weights::TensorView;

// Returns the two matrices of a factor as a file of single modules has them.
std::pair<PeftMatrix, PeftMatrix> ModuleMatrices(const LoraFactor& factor,
                                                 const std::string& path) {
  const bool embeds = factor.module == TargetModule::kEmbedTokens;
  const auto make = [&](const char* a_or_b, int64_t rows, int64_t columns,
                        int64_t offset) {
    return PeftMatrix{
        .name = absl::StrCat(path, embeds ? ".lora_embedding_" : ".lora_",
                             a_or_b, embeds ? "" : ".weight"),
        .rows = rows,
        .columns = columns,
        .offset = offset,
        .tensor_rows = rows,
        .tensor_columns = columns};
  };
  return {make("A", factor.rank, factor.in, factor.a_offset),
          make("B", factor.out, factor.rank, factor.b_offset)};
}

bool HasFactors(const AdapterLayout& layout, const LoraFactor& factor,
                ProjectionGroup group) {
  return !layout.group(factor.layer, group, factor.expert).factors.empty();
}

// Points the matrices of an expert to those of the fused parameter. PEFT wraps
// gate and up first if an adapter has both parameters, and calls what it has
// wrapped base_layer.
void PointToFused(const LoraFactor& factor, const AdapterLayout& layout,
                  const std::string& experts_path, int num_experts,
                  PeftMatrix& a, PeftMatrix& b) {
  const bool is_down = factor.module == TargetModule::kDownProj;
  const bool is_inner =
      !is_down && HasFactors(layout, factor, ProjectionGroup::kDown);
  const std::string path =
      absl::StrCat(experts_path, is_inner ? ".base_layer" : "");
  a.name = absl::StrCat(path, ".lora_A.weight");
  a.tensor_rows = num_experts * factor.rank;
  a.first_row = factor.expert * factor.rank;
  b.name = absl::StrCat(path, ".lora_B.weight");
  b.tensor_rows = is_down ? factor.out : 2 * factor.out;
  b.first_row = factor.module == TargetModule::kUpProj ? factor.out : 0;
  b.tensor_columns = factor.rank * num_experts;
  b.first_column = factor.expert;
  b.column_step = num_experts;
}

absl::StatusOr<const TensorView*> FindMatrix(const TensorMap& tensors,
                                             const PeftMatrix& matrix) {
  const auto found = tensors.find(matrix.name);
  if (found == tensors.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", matrix.name, "' is missing"));
  }
  const TensorView& view = found->second;
  const std::vector<int64_t> expected = {matrix.tensor_rows,
                                         matrix.tensor_columns};
  if (view.shape != expected) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", matrix.name, "' has shape ",
                     weights::ShapeString(view.shape), "; expected ",
                     weights::ShapeString(expected)));
  }
  if (view.dtype != ScalarType::kF32 && view.dtype != ScalarType::kF16 &&
      view.dtype != ScalarType::kBf16) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor '", matrix.name, "' has dtype ",
        weights::ScalarTypeName(view.dtype), "; accepted: F32, F16, BF16"));
  }
  return &view;
}

bool IsWhole(const PeftMatrix& matrix) {
  return matrix.rows == matrix.tensor_rows &&
         matrix.columns == matrix.tensor_columns;
}

// Converts each tensor once, although many matrices are parts of it.
class FusedTensors {
 public:
  explicit FusedTensors(const TensorMap& tensors) : tensors_(tensors) {}

  absl::Status CopyPart(const PeftMatrix& matrix, absl::Span<float> place) {
    std::vector<float>& values = converted_[matrix.name];
    if (values.empty()) {
      values.resize(matrix.tensor_rows * matrix.tensor_columns);
      WEFT_RETURN_IF_ERROR(weights::CopyToFloats(tensors_.at(matrix.name),
                                                 absl::MakeSpan(values)));
    }
    for (int64_t i = 0; i < matrix.rows; ++i) {
      const float* row = values.data() +
                         (matrix.first_row + i) * matrix.tensor_columns +
                         matrix.first_column;
      for (int64_t j = 0; j < matrix.columns; ++j) {
        place[i * matrix.columns + j] = row[j * matrix.column_step];
      }
    }
    return absl::OkStatus();
  }

 private:
  const TensorMap& tensors_;
  absl::flat_hash_map<std::string, std::vector<float>> converted_;
};

}  // namespace

std::vector<PeftMatrix> MatricesOf(const AdapterLayout& layout,
                                   const ExpertShape& experts,
                                   absl::string_view prefix,
                                   const TensorMap* tensors) {
  std::vector<PeftMatrix> matrices;
  matrices.reserve(layout.factors().size() * 2);
  for (const LoraFactor& factor : layout.factors()) {
    auto [a, b] = ModuleMatrices(
        factor, absl::StrCat(prefix, ".", ModulePath(factor, experts)));
    const bool is_expert =
        factor.expert != kNoExpert && factor.expert < experts.count;
    if (is_expert && tensors != nullptr && !tensors->contains(a.name)) {
      const std::string fused =
          absl::StrCat(prefix, ".model.layers.", factor.layer, ".mlp.experts");
      if (tensors->contains(absl::StrCat(fused, ".lora_A.weight"))) {
        PointToFused(factor, layout, fused, experts.count, a, b);
      }
    }
    matrices.push_back(std::move(a));
    matrices.push_back(std::move(b));
  }
  return matrices;
}

absl::StatusOr<std::vector<float>> Gather(
    const TensorMap& tensors, int64_t size,
    const std::vector<PeftMatrix>& matrices) {
  for (const PeftMatrix& matrix : matrices) {
    WEFT_RETURN_IF_ERROR(FindMatrix(tensors, matrix).status());
  }
  std::vector<float> buffer(size);
  FusedTensors fused(tensors);
  for (const PeftMatrix& matrix : matrices) {
    const absl::Span<float> place = absl::MakeSpan(buffer).subspan(
        matrix.offset, matrix.rows * matrix.columns);
    WEFT_RETURN_IF_ERROR(
        IsWhole(matrix) ? weights::CopyToFloats(tensors.at(matrix.name), place)
                        : fused.CopyPart(matrix, place));
  }
  return buffer;
}

}  // namespace weft::lora
