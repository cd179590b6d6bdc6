// A shared library calls the functions that it imports through a table of their addresses, which
// Python's import fills at once: a BLAS loaded later cannot come before the one that was linked,
// but the table's entries can be written again.
#include "blas.h"

#if defined(__linux__) && defined(__LP64__)
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <utility>
#include <vector>

#include "mlx/version.h"
#include "sgemm.h"

namespace mlx_h2o {

namespace {

// What decides how fast a model is, and so which BLAS is in use.
constexpr const char* kMatmul = "cblas_sgemm";
constexpr const char* kSetThreads = "openblas_set_num_threads";

// A loaded library as its program headers describe it.
struct Library {
  uintptr_t base = 0;
  const ElfW(Dyn) * dynamic = nullptr;
  // What the loader made read-only when it had filled it in.
  uintptr_t sealed = 0, sealed_end = 0;

  // glibc has made the dynamic section's addresses absolute; other loaders leave offsets.
  uintptr_t address(uintptr_t value) const {
    return value < base ? base + value : value;
  }
};

struct Import {
  std::string name;
  void** entry;
  bool sealed;
};

// What redirect_blas wrote over.
std::vector<std::pair<Import, void*>> replaced;

int describe(dl_phdr_info* info, size_t, void* result) {
  auto& library = *static_cast<Library*>(result);
  if (info->dlpi_addr != library.base) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    const uintptr_t start = library.base + header.p_vaddr;
    if (header.p_type == PT_DYNAMIC) {
      library.dynamic = reinterpret_cast<const ElfW(Dyn)*>(start);
    } else if (header.p_type == PT_GNU_RELRO) {
      library.sealed = start;
      library.sealed_end = start + header.p_memsz;
    }
  }
  return 1;
}

Library libmlx() {
  Dl_info info;
  Library library;
  if (dladdr(reinterpret_cast<const void*>(&mlx::core::version), &info)) {
    library.base = reinterpret_cast<uintptr_t>(info.dli_fbase);
    dl_iterate_phdr(&describe, &library);
  }
  return library;
}

// The functions that a library imports: those called through stubs, then those called directly.
std::vector<Import> imports(const Library& library) {
  uintptr_t symbols = 0, names = 0, stubs = 0, direct = 0;
  size_t stubs_size = 0, direct_size = 0;
  for (auto* d = library.dynamic; d && d->d_tag != DT_NULL; ++d) {
    switch (d->d_tag) {
      case DT_SYMTAB: symbols = library.address(d->d_un.d_ptr); break;
      case DT_STRTAB: names = library.address(d->d_un.d_ptr); break;
      case DT_JMPREL: stubs = library.address(d->d_un.d_ptr); break;
      case DT_PLTRELSZ: stubs_size = d->d_un.d_val; break;
      case DT_RELA: direct = library.address(d->d_un.d_ptr); break;
      case DT_RELASZ: direct_size = d->d_un.d_val; break;
      default: break;
    }
  }
  std::vector<Import> result;
  for (const auto& [table, size] : {std::pair{stubs, stubs_size}, {direct, direct_size}}) {
    const auto* entries = reinterpret_cast<const ElfW(Rela)*>(table);
    for (size_t i = 0; i < size / sizeof(*entries); ++i) {
      const auto* symbol =
          reinterpret_cast<const ElfW(Sym)*>(symbols) + ELF64_R_SYM(entries[i].r_info);
      if (symbol->st_name == 0 || symbol->st_shndx != SHN_UNDEF) continue;
      const uintptr_t at = library.base + entries[i].r_offset;
      result.push_back(
          {reinterpret_cast<const char*>(names) + symbol->st_name, reinterpret_cast<void**>(at),
           library.sealed <= at && at < library.sealed_end});
    }
  }
  return result;
}

std::string file_of(const void* function) {
  Dl_info info;
  return dladdr(function, &info) && info.dli_fname ? info.dli_fname : "";
}

bool protect(void** entry, int protection) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(entry) / page * page;
  return mprotect(reinterpret_cast<void*>(first), page, protection) == 0;
}

bool write(const Import& import, void* function) {
  if (import.sealed && !protect(import.entry, PROT_READ | PROT_WRITE)) return false;
  std::atomic_ref(*import.entry).store(function);
  return !import.sealed || protect(import.entry, PROT_READ);
}

}  // namespace

std::string blas_file() {
  for (const auto& import : imports(libmlx())) {
    if (import.name != kMatmul) continue;
    const bool ours = *import.entry == reinterpret_cast<void*>(&sgemm_in_pieces);
    return file_of(ours ? reinterpret_cast<void*>(piece_sgemm()) : *import.entry);
  }
  return "";
}

int redirect_blas(const std::string& library, const std::string& prefix) {
  restore_blas();
  const std::string linked = blas_file();
  if (linked.empty()) return 0;
  // Never closed: libmlx calls it until the process ends.
  void* other = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto find = [&](const std::string& name) {
    return other ? dlsym(other, (prefix + name).c_str()) : nullptr;
  };
  void *sgemm = find(kMatmul), *set_threads = find(kSetThreads);
  if (!sgemm || !set_threads) return 0;
  reinterpret_cast<void (*)(int)>(set_threads)(1);
  set_piece_sgemm(reinterpret_cast<Sgemm>(sgemm));
  const auto folder = std::filesystem::path(linked).parent_path();
  for (const auto& import : imports(libmlx())) {
    void* const before = *import.entry;
    if (std::filesystem::path(file_of(before)).parent_path() != folder) continue;
    void* function =
        import.name == kMatmul ? reinterpret_cast<void*>(&sgemm_in_pieces) : find(import.name);
    if (function && write(import, function)) replaced.emplace_back(import, before);
  }
  return static_cast<int>(replaced.size());
}

void restore_blas() {
  for (const auto& [import, function] : replaced) write(import, function);
  replaced.clear();
}

}  // namespace mlx_h2o

#else

namespace mlx_h2o {

std::string blas_file() {
  return "";
}

int redirect_blas(const std::string&, const std::string&) {
  return 0;
}

void restore_blas() {}

}  // namespace mlx_h2o

#endif
