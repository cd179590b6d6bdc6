// Arrays in the hands of plain C, and comparing them with golden ones.
#ifndef COMPARE_H
#define COMPARE_H

#include "cases.h"
#include "mlx_h2o_golden.h"

// Ends the program, with the library's message, if a call fails.
#define TRY(call) try_call((call), #call, __LINE__)
void try_call(int status, const char* call, int line);

// What a replay is about: the current case, its group's arrays, what went wrong so far.
typedef struct Replay_ {
  mlx_stream s;
  Cases cases;
  Case* c;
  mlx_map_string_to_array arrays;
  int differences;
  double worst;  // of the group, in units of what is tolerated
} Replay;

// An array of the case, "in" or "out"; empty where there is none. To be freed.
mlx_array golden(const Replay* r, const char* kind, const char* name);

// An array's elements as floats, or as int32 (uint32 keeps its bits); evaluated. To be freed.
float* floats_of(const Replay* r, mlx_array a);
int32_t* int32s_of(const Replay* r, mlx_array a);

// Compares a result with the golden one of that name: shape, dtype, elements.
void expect(Replay* r, const char* name, mlx_array got);
// The same of elements that were put together here.
void expect_floats(Replay* r, const char* name, const float* got, size_t count);
void expect_int32s(Replay* r, const char* name, const int32_t* got, size_t count);
// Notes a difference.
void differs(Replay* r, const char* name, const char* how);

#endif
