// The functions of mlx_h2o.h as a table: what each takes, so that wrong arguments can be made of
// right ones without a line of code for each.
#ifndef CALLS_H
#define CALLS_H

#include "mlx_h2o_golden.h"

enum { MOST_ARRAYS = 10, MOST_RESULTS = 4, MOST_INTS = 4, NOTHING = -1 };

// The arguments of one call, and the places of its results.
typedef struct Call_ {
  mlx_array in[MOST_ARRAYS];
  mlx_array out[MOST_RESULTS];
  long long number;  // the result of functions that give a number
  int ints[MOST_INTS];
  float scale;
  const char* texts[2];
  mlx_h2o_policy policy;
  mlx_h2o_cache cache;
  mlx_stream s;
  int missing;  // which result has no place; NOTHING: all have
} Call;

// An array. Axes are letters, each of one length in all arrays of a call (length_of); of the kinds
//   f floating, s float32, i int32, u uint32, b boolean, m a mask (boolean or floating),
//   w weights (float32, broadcast), r rows (any dtype, alike), x an index of S slots (int32).
typedef struct Array_ {
  const char *name, *axes;
  char kind;
  bool optional;
} Array;

// A number, one that is right, and some that are not.
typedef struct Int_ {
  const char* name;
  int right, wrong[5];
  int wrong_count;
} Int;

typedef struct Function_ {
  const char* name;
  int (*call)(Call*);
  Array in[MOST_ARRAYS];
  int results;        // arrays that come out; -1: a number
  const char* loose;  // axes of which one array may have another length
  Int ints[MOST_INTS];
  bool scaled, policy, cache, streamed;
  bool may_be_empty;  // whether its results are empty handles where there is nothing to tell
  const char *text, *wrong_text[2];  // the last text, and such as are refused, as NULL is
} Function;

extern const Function kFunctions[];
extern const int kFunctionCount;

int length_of(char axis);

#endif
