#include "src/lora/bf16_panels.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/bf16_product.h"

namespace weft::lora::bf16 {
namespace {

using kernels::cpu::kBf16PanelInputs;
using kernels::cpu::kBf16PanelOutputs;

// Returns the size of a panel in floats, each of which holds two bf16 elements.
int64_t FloatsOfPanel(int64_t num_inputs) {
  return (num_inputs + 1) / 2 * kBf16PanelOutputs;
}

// Rounds and packs a weight that fits in one panel.
void Round(const Weight& weight, float* panel) {
  ops::Bf16Table().round_panel({.weight = weight.data,
                                .input_stride = weight.input_stride,
                                .output_stride = weight.output_stride,
                                .num_inputs = weight.num_inputs,
                                .num_outputs = weight.num_outputs},
                               /*scale=*/1, reinterpret_cast<uint16_t*>(panel));
}

// Calls f(first input, number of inputs, first output, number of outputs,
// offset in floats) for every panel of a weight.
template <typename Function>
void ForEachPanel(int64_t num_inputs, int64_t num_outputs, Function f) {
  int64_t offset = 0;
  for (int64_t output = 0; output < num_outputs; output += kBf16PanelOutputs) {
    for (int64_t input = 0; input < num_inputs; input += kBf16PanelInputs) {
      const int64_t inputs = std::min(kBf16PanelInputs, num_inputs - input);
      f(input, inputs, output,
        std::min(kBf16PanelOutputs, num_outputs - output), offset);
      offset += FloatsOfPanel(inputs);
    }
  }
}

}  // namespace

Weight Weight::Outputs(int64_t begin, int64_t end) const {
  Weight part = *this;
  part.data += begin * output_stride;
  part.num_outputs = end - begin;
  return part;
}

void RoundRows(const cpu::Rows& x, int64_t num_rows, int64_t num_columns,
               float scale, const RoundedRows& to) {
  for (int64_t row = 0; row < num_rows; ++row) {
    ops::Bf16Table().round_row(x.From(row).data, scale, num_columns,
                               to.From(row).data);
  }
}

int64_t PanelFloats(int64_t num_inputs, int64_t num_outputs) {
  int64_t floats = 0;
  ForEachPanel(num_inputs, num_outputs,
               [&](int64_t, int64_t inputs, int64_t, int64_t, int64_t offset) {
                 floats = offset + FloatsOfPanel(inputs);
               });
  return floats;
}

void PackPanels(const Weight& weight, float* panels) {
  ForEachPanel(weight.num_inputs, weight.num_outputs,
               [&](int64_t input, int64_t inputs, int64_t output,
                   int64_t outputs, int64_t offset) {
                 Weight part = weight.Outputs(output, output + outputs);
                 part.data += input * weight.input_stride;
                 part.num_inputs = inputs;
                 Round(part, panels + offset);
               });
}

void MultiplyPanels(const RoundedRows& x, int64_t num_rows, const float* panels,
                    int64_t num_inputs, int64_t num_outputs,
                    const cpu::Rows& y) {
  ForEachPanel(
      num_inputs, num_outputs,
      [&](int64_t input, int64_t inputs, int64_t output, int64_t outputs,
          int64_t offset) {
        ops::Bf16Table().multiply_panel(
            {.x = x.From(0, input).data,
             .x_row_stride = x.stride,
             .num_rows = num_rows,
             .panel = reinterpret_cast<const uint16_t*>(panels + offset),
             .num_inputs = inputs,
             .num_outputs = outputs,
             .adds = input > 0,
             .y_BO = y.From(0, output).data,
             .y_stride = y.stride});
      });
}

Weight TermPanels::Joined(const std::vector<Part>& parts, int64_t num_outputs) {
  const Part& last = parts.back();
  const int64_t first_column = parts.front().term->x_column;
  const int64_t num_inputs =
      last.term->x_column + last.weight.num_inputs - first_column;
  joined_.assign(num_inputs * num_outputs, 0);
  for (const Part& part : parts) {
    const Weight& weight = part.weight;
    for (int64_t o = 0; o < weight.num_outputs; ++o) {
      float* to = joined_.data() + (part.output + o) * num_inputs +
                  part.term->x_column - first_column;
      for (int64_t i = 0; i < weight.num_inputs; ++i) {
        to[i] = weight.data[i * weight.input_stride + o * weight.output_stride];
      }
    }
  }
  return {.data = joined_.data(),
          .input_stride = 1,
          .output_stride = num_inputs,
          .num_inputs = num_inputs,
          .num_outputs = num_outputs};
}

void TermPanels::Pack(const RowTerms& rows, const ops::Bf16Block& block) {
  num_inputs_ = 0;
  std::vector<Part> parts;
  const int64_t block_end = block.output + block.num_outputs;
  for (const Term& term : rows.terms) {
    const int64_t begin = std::max(block.output, term.column);
    const int64_t end =
        std::min(block_end, term.column + term.weight.num_outputs);
    if (begin >= end) continue;
    parts.push_back({.term = &term,
                     .output = begin - block.output,
                     .weight = term.weight.Outputs(begin - term.column,
                                                   end - term.column)});
  }
  if (parts.empty()) return;
  const bool is_whole = parts.size() == 1 &&
                        parts.front().weight.num_outputs == block.num_outputs;
  const Weight weight =
      is_whole ? parts.front().weight : Joined(parts, block.num_outputs);
  x_column_ = parts.front().term->x_column;
  num_inputs_ = weight.num_inputs;
  const int64_t floats = FloatsOfPanel(num_inputs_);
  if (!panel_F_.defined() || panel_F_.size(0) < floats) {
    panel_F_ = at::empty({floats}, at::kFloat);
  }
  Round(weight, panel_F_.mutable_data_ptr<float>());
}

kernels::cpu::Bf16Terms TermPanels::operator()(ops::Bf16Block& block) {
  // Finds the first RowTerms that end after the block's first row.
  const auto rows = std::ranges::find_if(
      terms_, [&](const RowTerms& terms) { return terms.end > block.row; });
  if (rows == terms_.end()) return {};
  if (rows->begin > block.row) {
    block.num_rows = std::min(block.num_rows, rows->begin - block.row);
    return {};
  }
  block.num_rows = std::min(block.num_rows, rows->end - block.row);
  Pack(*rows, block);
  if (num_inputs_ == 0) return {};
  return {.x = x_.From(block.row, x_column_).data,
          .x_row_stride = x_.stride,
          .panel = reinterpret_cast<const uint16_t*>(
              panel_F_.const_data_ptr<float>()),
          .num_inputs = num_inputs_};
}

}  // namespace weft::lora::bf16
