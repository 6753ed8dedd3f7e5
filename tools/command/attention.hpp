// Attention problems on the host as the command handles them: made from files or at random, computed by the
// CPU reference, compared by the project's rule.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "command.hpp"
#include "flashjit/spec.hpp"
#include "reference/inputs.hpp"
#include "reference/reference.hpp"

namespace flashjit::command {

/// What a problem computes to, in fp64, contiguous: out [b, hq, sq, dv], lse [b, hq, sq], gradients like
/// their tensors. Gradients are empty where the backward pass was not asked for.
struct Results {
  std::vector<double> out, lse, dq, dk, dv;
  std::vector<double> dsinks = {};   ///< [hq] where the spec has them
  std::vector<double> row_max = {};  ///< with row_max, like lse
  reference::CaptureGrads capture_grads =
      {};                               ///< of each of the problem's captures; empty where none is wanted
  std::vector<double> dsink_rows = {};  ///< the reference's alone: [b, hq, sq], what dsinks are the sums of
  reference::CaptureGrads capture_squares = {}, capture_counts = {};  ///< as in reference::Backward
};

/// The CPU reference's results; the gradients too when problem.spec.pass is backward.
Results reference_results(const reference::Problem& problem,
                          reference::Precision precision = reference::Precision::exact);

/// One output against the reference.
struct Comparison {
  std::string output;  ///< "out", "lse", "dq", ..., "dsinks", "grad of bias"
  double error = 0, limit = 0;

  bool ok() const { return error <= limit; }
};

/// Compares each output of the problem's pass (backward: the forward's too): out within 2 and gradients
/// within 3 times the error of a straightforward computation in the spec's type, lse within 1e-3.
std::vector<Comparison> compare(const Results& got, const Results& exact, const Results& rounded,
                                const reference::Problem& problem);
bool all_ok(const std::vector<Comparison>& comparisons);
Json to_json(const Comparison& comparison);

/// Normal Q, K, V and dO rounded to the spec's type; what its options ask for, and captures as it declares
/// them.
reference::Problem random_problem(const KernelSpec& spec, const AttentionShape& shape, std::uint64_t seed);

/// Gives captured scalars the values of "name=value" texts. Throws Error(invalid_argument) for a text that is
/// none and for a name that is no scalar of the problem's programs.
void set_scalars(reference::Problem& problem, const std::vector<std::string>& texts);

/// Memory order of the tensors in .npy files: [batch, heads, length, dim] or [batch, length, heads, dim].
enum class Layout : std::uint8_t { bhsd, bshd };

/// A file with what an option of a spec asks for.
struct OptionFile {
  std::string_view flag;    ///< of the command: "--kv-lengths"
  std::string_view option;  ///< as in a spec: "kvlen"
  bool (*is_on)(const AttentionSpec&);
  std::string_view holds;  ///< "int32 [batch]"
};
std::span<const OptionFile> option_files();

/// The files of a problem's inputs; empty paths where the spec has none.
struct InputFiles {
  std::string q, k, v, dout = {};
  std::map<std::string_view, std::string> of_options = {};  ///< by OptionFile::flag
  std::vector<std::string> captures = {};                   ///< "name=file", one for each captured tensor
  std::vector<std::string> scalars = {};                    ///< "name=value"
};

/// Refuses a file whose option the spec has not, and an option without its file.
void check_files(const KernelSpec& spec, const InputFiles& files);

/// Reads Q, K, V and, where given, dO, lengths, map and captures; rounds to the spec's type; checks every
/// size against the spec. With varlen, Q, K, V and dO have batch 1 and all sequences' rows. Throws Error(io)
/// for a bad file, Error(invalid_argument) for files that do not fit together.
reference::Problem read_problem(const KernelSpec& spec, const InputFiles& files, Layout layout);

/// Swaps heads and length of [b, x, y, d]: the values of `shape` (b, x, y, d) come back as (b, y, x, d).
std::vector<double> swap_heads_and_length(const std::vector<double>& values,
                                          const std::vector<std::int64_t>& shape);

}  // namespace flashjit::command
