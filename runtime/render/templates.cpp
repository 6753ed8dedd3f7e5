#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include "flashjit/error.hpp"
#include "render/render.hpp"
#include "support/until_unload.hpp"

namespace flashjit::render {

std::map<std::string, std::string> embedded_template_texts();  // made by tools/embed_files.cmake

namespace {

namespace fs = std::filesystem;

/// Lines end in LF in keys, whatever an editor made of them.
void drop_carriage_returns(std::string& text) {
  for (std::size_t at = 0; (at = text.find("\r\n", at)) != text.npos;) text.erase(at, 1);
}

std::string read_template(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file.good() && !file.eof()) {
    throw Error(ErrorCode::io,
                fmt::format("cannot read the template {}; check that it is a readable file", path.string()));
  }
  drop_carriage_returns(text);
  return text;
}

// Headers that the host was compiled with as well say so: a kernel made from others would disagree with it.
bool shared_with_host(const std::string& text) {
  return text.find("Host and device include this file") != std::string::npos;
}

void check_shared_headers(const std::map<std::string, std::string>& texts, const fs::path& folder) {
  for (const auto& [name, text] : TemplateSet::embedded().all()) {
    if (!shared_with_host(text)) continue;
    const auto found = texts.find(name);
    if (found != texts.end() && found->second == text) continue;
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("{} in the template folder {} is not the one this flashjit was built with, and the host "
                    "code uses it too; rebuild flashjit with the changed file, or restore it",
                    name, folder.string()));
  }
}

}  // namespace

const TemplateSet& TemplateSet::embedded() {
  static const TemplateSet& set = until_unload([] {
    TemplateSet made;
    made.texts_ = embedded_template_texts();
    return made;
  }());
  return set;
}

TemplateSet TemplateSet::from_folder(const fs::path& folder) {
  std::error_code error;
  TemplateSet set;
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() != ".cuh" || !it->is_regular_file(error)) continue;
    set.texts_["flashjit/" + it->path().lexically_relative(folder).generic_string()] =
        read_template(it->path());
  }
  if (error || set.texts_.empty()) {
    throw Error(ErrorCode::io,
                fmt::format("no templates in {}: {}; give a copy of flashjit's templates/ folder",
                            folder.string(), error ? error.message() : "it holds no .cuh file"));
  }
  check_shared_headers(set.texts_, folder);
  return set;
}

const std::string& TemplateSet::get(const std::string& name) const {
  const auto found = texts_.find(name);
  if (found == texts_.end()) {
    throw Error(ErrorCode::internal,
                fmt::format("there is no template {} among the {} known; a template that is "
                            "included must lie in templates/",
                            name, texts_.size()));
  }
  return found->second;
}

}  // namespace flashjit::render
