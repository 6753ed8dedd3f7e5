// A kernel's machine code as the images it consists of, and how these are loaded.
#include "device/images.hpp"

#include <elf.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>

#include "device/loaded_kernel.hpp"
#include "tests/support/fake_driver.hpp"

namespace flashjit {
namespace {

template <class T>
std::string bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

/// An ELF file: a header, a section of `content`, one without bytes, and the table of both at its end or
/// before the content.
std::string elf(const std::string& content, bool table_last = true) {
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  header.e_ident[EI_CLASS] = ELFCLASS64;
  header.e_shnum = 2;
  Elf64_Shdr section{}, empty{};
  section.sh_type = SHT_PROGBITS;
  section.sh_size = content.size();
  empty.sh_type = SHT_NOBITS;
  empty.sh_size = 1 << 20;
  header.e_shoff = sizeof(header) + (table_last ? content.size() : 0);
  section.sh_offset = sizeof(header) + (table_last ? 0 : 2 * sizeof(section));
  const std::string table = bytes_of(section) + bytes_of(empty);
  return bytes_of(header) + (table_last ? content + table : table + content);
}

std::vector<std::string> split(const std::string& cubin) {
  std::vector<std::string> parts;
  for (const std::string_view image : device::images(cubin)) parts.emplace_back(image);
  return parts;
}

TEST(Images, FollowEachOther) {
  const std::string within = std::string(ELFMAG) + " is no beginning here";
  const std::string a = elf("machine code"), b = elf(within, false), c = elf("");
  EXPECT_EQ(split(a), std::vector{a});
  EXPECT_EQ(split(a + b), (std::vector{a, b}));
  EXPECT_EQ(split(b + c + a), (std::vector{b, c, a}));
  EXPECT_EQ(split(""), std::vector<std::string>{});
}

TEST(Images, BytesThatFillUpBelongToTheImageBefore) {
  const std::string a = elf("a"), b = elf("b"), filler(5, '\0');
  EXPECT_EQ(split(a + filler + b + filler), (std::vector{a + filler, b + filler}));
}

TEST(Images, DamageIsOneImageWithAllBehind) {
  const std::string a = elf("a"), b = elf("b");
  for (const std::string& damaged :
       {std::string("damaged"), a.substr(0, 40), "x" + a + b, std::string("\x7f")})
    EXPECT_EQ(split(damaged), std::vector{damaged});
  EXPECT_EQ(split(b + a.substr(0, 40)), (std::vector{b, a.substr(0, 40)}));
}

// Whatever the bytes say of sizes: nothing is lost, invented or read from elsewhere.
TEST(Images, AreAllOfAnyBytes) {
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    std::string cubin = elf("code") + elf("more code", false);
    for (unsigned changes = random() % 8; changes > 0; --changes)
      cubin[random() % cubin.size()] = static_cast<char>(random() % 4 == 0 ? 0xff : random());
    cubin.resize(random() % 4 == 0 ? random() % cubin.size() : cubin.size());
    const std::string exact(cubin.begin(), cubin.end());  // for the address sanitizer
    std::string joined;
    for (const std::string& part : split(exact)) {
      ASSERT_FALSE(part.empty());
      joined += part;
    }
    ASSERT_EQ(joined, exact);
  }
}

// --- loading ---

int failed_calls = 0;

/// A driver that knows an image's library by its content, in which it finds the entries.
std::shared_ptr<device::Driver> driver_that_looks() {
  auto driver = std::make_shared<device::Driver>(*test::FakeDriver::driver());
  driver->library_load_data = [](CUlibrary* library, const void* code, CUjit_option*, void**, unsigned,
                                 CUlibraryOption*, void**, unsigned) {
    ++test::FakeDriver::state().libraries_loaded;
    *library =
        reinterpret_cast<CUlibrary>(new std::string(static_cast<const char*>(code) + sizeof(Elf64_Ehdr)));
    return CUDA_SUCCESS;
  };
  driver->library_unload = [](CUlibrary library) {
    ++test::FakeDriver::state().libraries_unloaded;
    delete reinterpret_cast<std::string*>(library);
    return CUDA_SUCCESS;
  };
  driver->library_get_kernel = [](CUkernel* kernel, CUlibrary library, const char* name) {
    if (*reinterpret_cast<std::string*>(library) != name) {
      ++failed_calls;
      return CUDA_ERROR_NOT_FOUND;
    }
    *kernel = reinterpret_cast<CUkernel>(library);
    return CUDA_SUCCESS;
  };
  return driver;
}

plan::Entry entry(const char* name, bool hot = false) {
  return {.name = name, .header = "", .function = "", .hot = hot};
}

TEST(LoadedKernel, FindsEachEntryInItsImage) {
  test::FakeDriver& fake = test::FakeDriver::state();
  fake.reset();
  const auto image_of = [](const std::string& symbol) { return elf(symbol + '\0'); };
  const std::string cubin = image_of("flashjit_backward") + image_of("flashjit_preprocess");
  {
    const device::LoadedKernel kernel(driver_that_looks(), cubin,
                                      {entry("preprocess"), entry("backward", true)});
    EXPECT_EQ(*reinterpret_cast<std::string*>(kernel.kernel(0)), "flashjit_preprocess");
    EXPECT_EQ(*reinterpret_cast<std::string*>(kernel.kernel(1)), "flashjit_backward");
    EXPECT_EQ(fake.libraries_loaded, 2);
    EXPECT_EQ(failed_calls, 0) << "compute-sanitizer would report them";
  }
  EXPECT_EQ(fake.libraries_unloaded, 2);
  try {
    const device::LoadedKernel kernel(driver_that_looks(), cubin,
                                      {entry("backward", true), entry("forward")});
    FAIL() << "an entry is missing";
  } catch (const device::CodeRefused& error) {
    EXPECT_NE(error.message().find("cuLibraryGetKernel of flashjit_forward"), std::string::npos);
  }
  EXPECT_EQ(fake.libraries_loaded, 4);
  EXPECT_EQ(fake.libraries_unloaded, 4);
}

}  // namespace
}  // namespace flashjit
