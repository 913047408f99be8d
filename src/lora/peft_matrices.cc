#include "src/lora/peft_matrices.h"

#include <algorithm>
#include <numeric>
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

// Returns A and B of a factor as tensors of their own (FusedForm::kSingle).
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

// Returns, for each row of the module's B, the row in a file. Returns an empty
// list if they are the same. Files have the features of q's and k's heads in
// the order ModelShape::head_order, and the rows of fused inputs of a gated
// delta rule key head by key head: its q, k, v and z, or its b and a.
std::vector<int> FileRows(TargetModule module,
                          const model_config::ModelShape& shape) {
  std::vector<int> rows;
  const model_config::DeltaShape& delta = shape.delta;
  const auto group = [&](const std::vector<int64_t>& sizes) {
    const int64_t all = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    int64_t first = 0;
    for (const int64_t size : sizes) {
      for (int64_t j = 0; j < delta.key_heads; ++j) {
        for (int64_t i = 0; i < size; ++i) {
          rows.push_back(static_cast<int>(all * j + first + i));
        }
      }
      first += size;
    }
  };
  const auto order = [&](int64_t head_rows) {
    const auto head_dim = static_cast<int64_t>(shape.head_order.size());
    for (int64_t i = 0; i < OutWidth(shape, module); ++i) {
      const int64_t of_head = i % head_rows;
      rows.push_back(static_cast<int>(
          of_head < head_dim ? i - of_head + shape.head_order[of_head] : i));
    }
  };
  switch (module) {
    case TargetModule::kInProjQkvz: {
      const int64_t keys = delta.key_features;
      const int64_t values = delta.value_width() / delta.key_heads;
      group({keys, keys, values, values});
      break;
    }
    case TargetModule::kInProjBa: {
      const int64_t heads = delta.value_heads / delta.key_heads;
      group({heads, heads});
      break;
    }
    case TargetModule::kQProj:
    case TargetModule::kKProj: {
      const auto head_dim = static_cast<int64_t>(shape.head_order.size());
      const bool has_gates =
          module == TargetModule::kQProj && shape.gate_width > 0;
      if (head_dim > 0) order(has_gates ? 2 * head_dim : head_dim);
      break;
    }
    default:
      break;
  }
  return rows;
}

bool HasFactors(const AdapterLayout& layout, const LoraFactor& factor,
                ProjectionGroup group) {
  return !layout.group(factor.layer, group, factor.expert).factors.empty();
}

// Makes an expert's A and B refer to parts of the fused parameter's A and B. If
// an adapter has both gate_up_proj and down_proj, PEFT's wrapper for down_proj
// wraps its wrapper for gate_up_proj. So the path of gate_up_proj contains
// base_layer, PEFT's name for the wrapped part.
void PointToFused(const LoraFactor& factor, const AdapterLayout& layout,
                  const model_config::ExpertShape& experts,
                  absl::string_view prefix, FusedForm form, PeftMatrix& a,
                  PeftMatrix& b) {
  const bool is_down = factor.module == TargetModule::kDownProj;
  const bool is_up = factor.module == TargetModule::kUpProj;
  const bool is_inner =
      !is_down && HasFactors(layout, factor, ProjectionGroup::kDown);
  const std::string path =
      absl::StrCat(prefix, ".model.layers.", factor.layer, ".mlp.experts",
                   is_inner ? ".base_layer" : "");
  const bool has_halves = form == FusedForm::kParts && !is_down;
  const int64_t rank = has_halves ? 2 * factor.rank : factor.rank;
  const int64_t first_rank = has_halves && is_up ? factor.rank : 0;
  const bool in_turns =
      experts.names == model_config::ExpertNames::kFused && !is_down;
  a.name = absl::StrCat(path, ".lora_A.weight");
  a.tensor_rows = experts.count * rank;
  a.first_row = factor.expert * rank + first_rank;
  b.name = absl::StrCat(path, ".lora_B.weight");
  b.tensor_rows = is_down ? factor.out : 2 * factor.out;
  if (is_up) b.first_row = in_turns ? 1 : factor.out;
  b.row_step = in_turns ? 2 : 1;
  b.tensor_columns = rank * experts.count;
  b.first_column = first_rank * experts.count + factor.expert;
  b.column_step = experts.count;
}

// Makes the A and B of a module refer to parts of those of the module that
// contains it (NumFused).
void PointToWhole(const LoraFactor& factor, const AdapterLayout& layout,
                  const model_config::ModelShape& shape,
                  absl::string_view prefix, FusedForm form, PeftMatrix& a,
                  PeftMatrix& b) {
  const ProjectionGroup group = GroupOf(factor.module);
  int64_t first_rank = 0, total_rank = factor.rank;
  if (form == FusedForm::kParts) {
    const GroupLayout& parts = layout.group(factor.layer, group);
    total_rank = parts.total_rank;
    for (const LoraFactor& part : parts.factors) {
      if (part.module == factor.module) break;
      first_rank += part.rank;
    }
  }
  int64_t rows = 0;
  for (const TargetModule module : ModulesOf(group)) {
    if (module == factor.module) b.first_row = rows;
    rows += OutWidth(shape, module);
  }
  const std::string path =
      absl::StrCat(prefix, ".model.layers.", factor.layer,
                   group == ProjectionGroup::kQkv ? ".self_attn." : ".mlp.",
                   FileModuleName(factor.module, shape));
  a.name = absl::StrCat(path, ".lora_A.weight");
  a.tensor_rows = total_rank;
  a.first_row = first_rank;
  b.name = absl::StrCat(path, ".lora_B.weight");
  b.tensor_rows = rows;
  b.tensor_columns = total_rank;
  b.first_column = first_rank;
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

// Converts each tensor of a file to floats only once, even if the tensor
// contains many matrices.
class FusedTensors {
 public:
  explicit FusedTensors(const TensorMap& tensors) : tensors_(tensors) {}

  // Returns the values of the whole tensor that contains the matrix.
  absl::StatusOr<absl::Span<const float>> All(const PeftMatrix& matrix) {
    std::vector<float>& values = converted_[matrix.name];
    if (values.empty()) {
      values.resize(matrix.tensor_rows * matrix.tensor_columns);
      WEFT_RETURN_IF_ERROR(weights::CopyToFloats(tensors_.at(matrix.name),
                                                 absl::MakeSpan(values)));
    }
    return values;
  }

  absl::Status CopyPart(const PeftMatrix& matrix, absl::Span<float> place) {
    WEFT_ASSIGN_OR_RETURN(const absl::Span<const float> values, All(matrix));
    for (int64_t i = 0; i < matrix.rows; ++i) {
      const float* row = values.data() +
                         matrix.TensorRow(i) * matrix.tensor_columns +
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

// Returns whether the rows of the module in `all`, the whole B that contains
// `parts` modules, are zero outside the module's part of the columns
// (FusedForm::kParts).
bool HasPart(const LoraFactor& factor, int parts, const PeftMatrix& b,
             absl::Span<const float> all) {
  if (factor.rank % parts != 0) return false;
  const auto modules = ModulesOf(GroupOf(factor.module));
  const int64_t width = b.tensor_columns / parts;
  const int64_t begin =
      (std::ranges::find(modules, factor.module) - modules.begin()) * width;
  for (int64_t row = 0; row < b.rows; ++row) {
    for (int64_t column = 0; column < b.tensor_columns; ++column) {
      const bool is_own = column >= begin && column < begin + width;
      if (!is_own && all[b.TensorRow(row) * b.tensor_columns + column] != 0) {
        return false;
      }
    }
  }
  return true;
}

// Returns whether gate and up of the experts may have a half of the rank each.
// If B is zero as in a new adapter, only the ranks say so: then gate and up
// have twice the rank of down.
bool HasRoomForHalves(const LoraFactor& gate, const AdapterLayout& layout,
                      absl::Span<const float> b) {
  if (std::ranges::any_of(b, [](float value) { return value != 0; })) {
    return true;
  }
  const GroupLayout& down =
      layout.group(gate.layer, ProjectionGroup::kDown, gate.expert);
  return down.factors.empty() || gate.rank == 2 * down.factors.front().rank;
}

}  // namespace

bool IsExpert(const LoraFactor& factor,
              const model_config::ExpertShape& experts) {
  return factor.expert != kNoExpert && factor.expert < experts.count;
}

std::vector<PeftMatrix> MatricesOf(const AdapterLayout& layout,
                                   const model_config::ModelShape& shape,
                                   absl::string_view prefix, FusedForm form) {
  const model_config::ExpertShape& experts = shape.experts;
  std::vector<PeftMatrix> matrices;
  matrices.reserve(layout.factors().size() * 2);
  for (const LoraFactor& factor : layout.factors()) {
    auto [a, b] = ModuleMatrices(
        factor, absl::StrCat(prefix, ".", ModulePath(factor, experts)));
    if (form != FusedForm::kSingle && IsExpert(factor, experts)) {
      PointToFused(factor, layout, experts, prefix, form, a, b);
    } else if (form != FusedForm::kSingle &&
               NumFused(factor.module, shape) > 1) {
      PointToWhole(factor, layout, shape, prefix, form, a, b);
    }
    b.row_order = FileRows(factor.module, shape);
    matrices.push_back(std::move(a));
    matrices.push_back(std::move(b));
  }
  return matrices;
}

absl::StatusOr<FusedForm> FormOf(const TensorMap& tensors,
                                 const AdapterLayout& layout,
                                 const model_config::ModelShape& shape,
                                 const std::vector<PeftMatrix>& fused) {
  const model_config::ExpertShape& experts = shape.experts;
  bool is_fused = false;
  bool has_parts = true;
  FusedTensors values(tensors);
  for (size_t i = 0; i < layout.factors().size(); ++i) {
    const LoraFactor& factor = layout.factors()[i];
    const bool is_expert = IsExpert(factor, experts);
    if (!is_expert && NumFused(factor.module, shape) == 1) continue;
    const PeftMatrix& b = fused[2 * i + 1];
    if (is_expert && !tensors.contains(b.name)) return FusedForm::kSingle;
    is_fused = true;
    if (!has_parts ||
        (is_expert &&
         (factor.expert > 0 || factor.module == TargetModule::kDownProj))) {
      continue;
    }
    WEFT_RETURN_IF_ERROR(FindMatrix(tensors, b).status());
    WEFT_ASSIGN_OR_RETURN(const absl::Span<const float> all, values.All(b));
    // The experts' B has the rows of gate and up.
    const int parts = is_expert ? 2 : NumFused(factor.module, shape);
    has_parts = HasPart(factor, parts, b, all) &&
                (!is_expert || HasRoomForHalves(factor, layout, all));
  }
  if (!is_fused) return FusedForm::kSingle;
  return has_parts ? FusedForm::kParts : FusedForm::kFused;
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
    WEFT_RETURN_IF_ERROR(matrix.is_whole() ? weights::CopyToFloats(
                                                 tensors.at(matrix.name), place)
                                           : fused.CopyPart(matrix, place));
  }
  return buffer;
}

std::vector<PeftTensor> Scatter(absl::Span<const float> buffer,
                                const std::vector<PeftMatrix>& matrices) {
  std::vector<PeftTensor> tensors;
  absl::flat_hash_map<std::string, size_t> places;
  for (const PeftMatrix& matrix : matrices) {
    const auto [place, is_new] =
        places.try_emplace(matrix.name, tensors.size());
    if (is_new) tensors.push_back({.name = matrix.name});
    PeftTensor& tensor = tensors[place->second];
    tensor.rows = std::max(tensor.rows, matrix.tensor_rows);
    tensor.columns = std::max(tensor.columns, matrix.tensor_columns);
  }
  for (PeftTensor& tensor : tensors) {
    tensor.values.resize(tensor.rows * tensor.columns);
  }
  for (const PeftMatrix& matrix : matrices) {
    PeftTensor& tensor = tensors[places.at(matrix.name)];
    for (int64_t i = 0; i < matrix.rows; ++i) {
      float* row = tensor.values.data() + matrix.TensorRow(i) * tensor.columns +
                   matrix.first_column;
      for (int64_t j = 0; j < matrix.columns; ++j) {
        row[j * matrix.column_step] =
            buffer[matrix.offset + i * matrix.columns + j];
      }
    }
  }
  return tensors;
}

}  // namespace weft::lora
