// Stacks that can be left and resumed: `switch_stack` saves the callee-saved registers on one and
// takes them from another. (ucontext would make a system call at every switch.)
#pragma once

#include <cstdint>
#include <cstring>

extern "C" void switch_stack(void** from, void* to);

#define STR_(x) #x
#define STR(x) STR_(x)
#define SYMBOL STR(__USER_LABEL_PREFIX__) "switch_stack"

#if defined(__x86_64__)

asm(".text\n"
    ".globl " SYMBOL "\n" SYMBOL ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");

// A stack whose first resumption calls `start`, which must never return.
inline void* fresh_stack(char* low, size_t size, void (*start)()) {
  auto top = reinterpret_cast<uintptr_t*>((reinterpret_cast<uintptr_t>(low) + size) & ~uintptr_t(15));
  *--top = 0;
  *--top = reinterpret_cast<uintptr_t>(start);
  top -= 6;
  memset(top, 0, 6 * sizeof(*top));
  return top;
}

#elif defined(__aarch64__)

asm(".text\n"
    ".globl " SYMBOL "\n" SYMBOL ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");

inline void* fresh_stack(char* low, size_t size, void (*start)()) {
  auto top = reinterpret_cast<uintptr_t*>((reinterpret_cast<uintptr_t>(low) + size) & ~uintptr_t(15));
  top -= 20;
  memset(top, 0, 20 * sizeof(*top));
  top[11] = reinterpret_cast<uintptr_t>(start);  // x30
  return top;
}

#else
#error "The host harness switches stacks on x86-64 and arm64 only."
#endif
