// What runtime/support/*_windows.cpp does, looked at on Windows or under wine, without a test framework,
// which would take longer to compile than all of this. Exit code 1 and a line for each thing that is not so.
//   seam.exe FOLDER          everything; the folder is the program's to write in
//   seam.exe hold FILE       locks the file, says "held" and waits for its end
//   seam.exe try FILE        says held, taken, gone or broken
//   seam.exe rewrite FILE N  replaces it N times
#include <windows.h>
// windows.h first.
#include <aclapi.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "flashjit/error.hpp"
#include "support/environment.hpp"
#include "support/file.hpp"
#include "support/file_lock.hpp"
#include "support/libraries.hpp"
#include "support/owner.hpp"
#include "support/paths.hpp"
#include "support/process.hpp"
#include "support/utf16.hpp"

namespace {

namespace fs = std::filesystem;
using namespace flashjit;
using Attempt = FileLock::Attempt;

int failures = 0;

void expect(bool so, const char* what, const std::string& seen = {}) {
  if (so) return;
  ++failures;
  std::printf("not so: %s; seen: %s\n", what, seen.c_str());
}

std::string problem_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.message();
  }
  return {};
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

fs::path named(const fs::path& folder) {
  return folder / path_of(
                      "fl\xc3\xbc\xc3\x9f"
                      "e \xe9\xa1\xb5 \xf0\x9f\x98\x80");
}

void files(const fs::path& folder) {
  const fs::path path = named(folder);
  const std::string bytes("\0\r\n\xff\x1a\n", 6);
  write_file_atomically(path, bytes);
  expect(read_file(path) == bytes, "any bytes come back, of a file of any name");
  write_file_atomically(path, "");
  expect(read_file(path).empty(), "it is replaced");
  expect(has(problem_of([&] { write_new_file(path, "x"); }), "cannot write"), "a new file replaces none");
  expect(has(problem_of([&] { read_file(folder / "no"); }), "cannot read"), "a missing file is named",
         problem_of([&] { read_file(folder / "no"); }));
  expect(has(problem_of([&] { read_file(folder); }), "not a regular file"), "a folder is no file");
  write_file_atomically(path, "12345");
  expect(has(problem_of([&] { read_file(path, 4); }), "5 bytes"), "a limit holds");
  fs::create_directories(folder / "taken" / "inside");
  expect(!problem_of([&] { write_file_atomically(folder / "taken", "x"); }).empty(), "a folder stays");
  expect(has(problem_of([&] { sync_folder(folder / "no"); }), "cannot open folder"), "no folder to sync");
  expect(!make_private_folders(path / "below").empty(), "a file has no folders");
  touch_file(path);
  int left = 0;
  for (const auto& entry : fs::directory_iterator(folder))
    left += entry.path().filename().string().starts_with(kUnfinishedPrefix);
  expect(left == 0, "no temporary file stays");
  expect(unique_suffix() != unique_suffix() && unique_suffix().size() == 24, "suffixes differ");
  expect(process_id() != 0, "there is a process");
  std::thread([] {
    run_after_others();
    expect(::GetThreadPriority(::GetCurrentThread()) == THREAD_PRIORITY_BELOW_NORMAL, "others go first");
  }).join();
}

void replaced_under_readers(const fs::path& folder) {
  const fs::path path = folder / "shared";
  const std::string a(100000, 'a'), b(50000, 'b');
  write_file_atomically(path, a);
  std::atomic<bool> done = false;
  std::thread writer([&] {
    for (int i = 0; i < 50; ++i) write_file_atomically(path, i % 2 ? a : b);
    done = true;
  });
  int reads = 0;
  while (!done) {
    // Between names Windows may refuse for a moment; a part is never seen.
    try {
      const std::string seen = read_file(path);
      expect(seen == a || seen == b, "a reader sees a part");
      ++reads;
    } catch (const Error&) {
    }
    ::Sleep(2);  // one that never lets go would keep it
  }
  writer.join();
  expect(reads > 0, "readers read");
}

void folders(const fs::path& folder) {
  const fs::path from = folder / "from", to = folder / "to", taken = folder / "taken";
  expect(make_private_folders(from).empty() && is_real_folder(from), "a private folder");
  write_file_atomically(from / "file", "x");
  FileLock lock;
  expect(lock.lock_folder(from) == Attempt::held, "a folder is locked");
  FileLock other;
  expect(other.lock_existing(from) == Attempt::taken, "and taken");
  expect(static_cast<bool>(rename_folder(from, taken)), "a folder is not renamed onto another");
  expect(!rename_folder(from, to) && read_file(to / "file") == "x", "a locked folder is renamed");
  lock = {};
  expect(other.lock_existing(to) == Attempt::held, "a free one");
  other = {};
  int locks = 0;
  for (const auto& entry : fs::directory_iterator(folder)) locks += entry.path().extension() == ".lock";
  expect(locks == 0, "no lock file stays");
  expect(!is_link(to) && !is_link(to / "file") && !is_link(folder / "no"), "none of them is a link");
}

void locks(const fs::path& folder) {
  const fs::path path = folder / path_of("schl\xc3\xbcssel.lock");
  FileLock one, two;
  expect(two.lock_existing(path) == Attempt::broken, "there is nothing to lock");
  expect(one.lock_file(path) == Attempt::held && one.held(), "a lock");
  expect(two.lock_file(path) == Attempt::taken && !two.held(), "for one alone");
  expect(two.lock_existing(path) == Attempt::taken, "for one alone, also where it exists");
  one.remove_and_release();
  expect(!fs::exists(path), "it leaves with its holder");
  expect(two.lock_file(path) == Attempt::held, "and is free");
}

void owners(const fs::path& folder) {
  const fs::path own = folder / "own";
  make_private_folders(own);
  std::optional<Owner> owner = owner_of(own, Links::kept);
  expect(owner && owner->is_user, "what is made is the user's", owner ? owner->name : "");
  expect(owner && owner->writers.empty(), "and nobody else's to write", owner ? owner->writers : "");
  expect(owner && owner->name.starts_with("S-1-"), "a SID", owner ? owner->name : "");
  expect(!owner_of(folder / "no", Links::followed), "nobody owns nothing");
  std::wstring name = own.wstring();
  ::SetNamedSecurityInfoW(name.data(), SE_FILE_OBJECT, DACL_SECURITY_INFORMATION, nullptr, nullptr, nullptr,
                          nullptr);
  owner = owner_of(own, Links::kept);
  expect(owner && !owner->writers.empty(), "without a list everyone writes");
}

void variables() {
  ::SetEnvironmentVariableW(L"FLASHJIT_PACKS", L"C:\\a;D:\\\u00fc b;");
  ::SetEnvironmentVariableW(L"FLASHJIT_CACHE_DIR", nullptr);
  ::SetEnvironmentVariableW(L"LOCALAPPDATA", L"C:\\users\\\u9875\\AppData\\Local");
  const Environment read = read_environment();
  expect(read.packs == std::vector<std::string>{"C:\\a", "D:\\\xc3\xbc b"}, "packs with drives",
         std::to_string(read.packs.size()));
  expect(read.cache_dir == "C:\\users\\\xe9\xa1\xb5\\AppData\\Local\\flashjit", "the default cache",
         read.cache_dir);
  ::SetEnvironmentVariableW(L"LOCALAPPDATA", L"relative");
  expect(read_environment().cache_dir.empty(), "only absolute paths count");
  expect(environment_value("FLASHJIT_NO_SUCH").empty(), "a variable that is not there");
}

void libraries(const fs::path& folder) {
  const OpenedLibrary kernel = open_library("kernel32.dll");
  expect(kernel.handle != nullptr, "a library of the system", kernel.problem);
  void* symbol = find_symbol(kernel.handle, "GetCurrentProcessId");
  expect(symbol && !find_symbol(kernel.handle, "flashjit_no_such"), "its functions");
  expect(has(file_with(symbol), "kernel32"), "where a function is", file_with(symbol));
  expect(has(open_library("flashjit-no-such.dll").problem, "flashjit-no-such.dll: "),
         "a missing one is named");

  // This program's own copy stands for a library that somebody left in the current folder.
  std::vector<wchar_t> self(32768);
  ::GetModuleFileNameW(nullptr, self.data(), static_cast<DWORD>(self.size()));
  fs::copy_file(self.data(), folder / "planted.dll");
  const fs::path before = fs::current_path();
  fs::current_path(folder);
  expect(open_library("planted.dll").handle == nullptr, "the current folder is not searched");
  fs::current_path(before);
  expect(
      std::string(library_names().nccl).empty() && nvrtc_builtins_name(12, 9) == "nvrtc-builtins64_129.dll",
      "names of Windows");
}

const char* name_of(Attempt attempt) {
  switch (attempt) {
    case Attempt::held:
      return "held";
    case Attempt::taken:
      return "taken";
    case Attempt::gone:
      return "gone";
    case Attempt::broken:
      break;
  }
  return "broken";
}

int with_file(const std::string& what, const fs::path& path, int rounds) {
  FileLock lock;
  if (what == "rewrite") {
    for (int i = 0; i < rounds; ++i) write_file_atomically(path, std::string(20000, i % 2 ? 'a' : 'b'));
    return 0;
  }
  std::printf("%s\n", name_of(lock.lock_file(path)));
  std::fflush(stdout);
  if (what == "hold") ::Sleep(INFINITE);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 2) return with_file(arguments[1], arguments[2], count > 3 ? std::atoi(arguments[3]) : 1);
  if (count != 2) return 2;
  const fs::path folder = fs::absolute(arguments[1]) / path_of("m\xc3\xa4rz");
  make_private_folders(folder);
  files(folder);
  replaced_under_readers(folder);
  folders(folder);
  locks(folder);
  owners(folder);
  variables();
  libraries(folder);
  if (failures == 0) std::printf("all is so\n");
  return failures != 0;
}
