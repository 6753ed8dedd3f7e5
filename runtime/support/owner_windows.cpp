#include <windows.h>
// windows.h first.
#include <aclapi.h>
#include <sddl.h>

#include <memory>
#include <vector>

#include "support/owner.hpp"
#include "support/utf16.hpp"

namespace flashjit {
namespace {

using Sid = std::vector<unsigned char>;

Sid copy_of(PSID sid) {
  const auto* bytes = static_cast<const unsigned char*>(sid);
  return {bytes, bytes + ::GetLengthSid(sid)};
}

Sid well_known(WELL_KNOWN_SID_TYPE type) {
  Sid sid(SECURITY_MAX_SID_SIZE);
  DWORD size = static_cast<DWORD>(sid.size());
  if (!::CreateWellKnownSid(type, nullptr, sid.data(), &size)) return {};
  sid.resize(size);
  return sid;
}

/// The user, and what owns the files that it makes, which is a group where an administrator is elevated.
std::vector<Sid> sids_of_process() {
  HANDLE token = nullptr;
  if (!::OpenProcessToken(::GetCurrentProcess(), TOKEN_QUERY, &token)) return {};
  std::vector<Sid> sids;
  for (const TOKEN_INFORMATION_CLASS kind : {TokenUser, TokenOwner}) {
    DWORD size = 0;
    ::GetTokenInformation(token, kind, nullptr, 0, &size);
    std::vector<std::uint64_t> room(size / sizeof(std::uint64_t) + 1);
    if (!::GetTokenInformation(token, kind, room.data(), size, &size)) continue;
    sids.push_back(copy_of(kind == TokenUser ? reinterpret_cast<TOKEN_USER*>(room.data())->User.Sid
                                             : reinterpret_cast<TOKEN_OWNER*>(room.data())->Owner));
  }
  ::CloseHandle(token);
  return sids;
}

/// TrustedInstaller owns what Windows brings.
constexpr const wchar_t* kInstaller = L"S-1-5-80-956008885-3418522649-1831038044-1853292631-2271478464";

std::vector<Sid> sids_of_system() {
  std::vector<Sid> sids{well_known(WinLocalSystemSid), well_known(WinBuiltinAdministratorsSid)};
  PSID installer = nullptr;
  if (::ConvertStringSidToSidW(kInstaller, &installer)) {
    sids.push_back(copy_of(installer));
    ::LocalFree(installer);
  }
  return sids;
}

bool is_in(const std::vector<Sid>& sids, PSID sid) {
  for (const Sid& one : sids)
    if (!one.empty() && ::EqualSid(const_cast<unsigned char*>(one.data()), sid)) return true;
  return false;
}

std::string name_of(PSID sid) {
  wchar_t* text = nullptr;
  if (!::ConvertSidToStringSidW(sid, &text)) return "an unknown SID";
  std::string name = utf8_of(text);
  ::LocalFree(text);
  return name;
}

/// The first that may change the file and is none of `trusted`; empty: there is none.
std::string other_writer(PACL list, const std::vector<Sid>& trusted) {
  constexpr DWORD kWrites = FILE_WRITE_DATA | FILE_APPEND_DATA | FILE_DELETE_CHILD | DELETE | WRITE_DAC |
                            WRITE_OWNER | GENERIC_WRITE | GENERIC_ALL;
  if (!list) return "no access control list, so that everyone may";
  for (DWORD i = 0; i < list->AceCount; ++i) {
    void* entry = nullptr;
    if (!::GetAce(list, i, &entry)) continue;
    auto* allowed = static_cast<ACCESS_ALLOWED_ACE*>(entry);
    if (allowed->Header.AceType != ACCESS_ALLOWED_ACE_TYPE || (allowed->Header.AceFlags & INHERIT_ONLY_ACE))
      continue;
    PSID sid = &allowed->SidStart;
    if ((allowed->Mask & kWrites) && !is_in(trusted, sid)) return name_of(sid);
  }
  return {};
}

struct Closed {
  void operator()(void* handle) const { ::CloseHandle(handle); }
};

}  // namespace

std::optional<Owner> owner_of(const std::filesystem::path& path, Links links) {
  const DWORD flags =
      FILE_FLAG_BACKUP_SEMANTICS | (links == Links::kept ? FILE_FLAG_OPEN_REPARSE_POINT : DWORD{0});
  const HANDLE opened =
      ::CreateFileW(path.c_str(), READ_CONTROL, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE,
                    nullptr, OPEN_EXISTING, flags, nullptr);
  if (opened == INVALID_HANDLE_VALUE) return std::nullopt;
  const std::unique_ptr<void, Closed> file(opened);
  PSID sid = nullptr;
  PACL list = nullptr;
  PSECURITY_DESCRIPTOR descriptor = nullptr;
  if (::GetSecurityInfo(opened, SE_FILE_OBJECT, OWNER_SECURITY_INFORMATION | DACL_SECURITY_INFORMATION, &sid,
                        nullptr, &list, nullptr, &descriptor) != ERROR_SUCCESS)
    return Owner{.name = "unknown", .writers = "its access control list cannot be read"};
  const std::vector<Sid> own = sids_of_process(), system = sids_of_system();
  std::vector<Sid> trusted = own;
  trusted.insert(trusted.end(), system.begin(), system.end());
  // These two stand for the owner itself.
  trusted.push_back(well_known(WinCreatorOwnerSid));
  trusted.push_back(well_known(WinCreatorOwnerRightsSid));
  Owner owner{.is_user = is_in(own, sid),
              .is_system = is_in(system, sid),
              .name = name_of(sid),
              .writers = other_writer(list, trusted)};
  ::LocalFree(descriptor);
  return owner;
}

}  // namespace flashjit
