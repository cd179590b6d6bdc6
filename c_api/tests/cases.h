// Golden cases out of golden/cases.txt.
#ifndef CASES_H
#define CASES_H

#include <stdbool.h>
#include <stddef.h>

typedef struct Parameter_ {
  char* name;
  char* value;  // words, separated by single spaces
  bool read;    // whether it was asked for
} Parameter;

typedef struct Case_ {
  char* group;
  char* name;
  Parameter* parameters;
  size_t count;
} Case;

typedef struct Tolerance_ {
  double absolute, relative;
} Tolerance;

typedef struct Cases_ {
  Case* cases;
  size_t count;
  Tolerance float32, float16, bfloat16;
} Cases;

// Reads the file. Ends the program if it is missing, malformed, or of another schema.
Cases cases_read(const char* path);
void cases_free(Cases cases);

// A parameter's words, or NULL if the case does not have it.
const char* text_or_null(Case* c, const char* name);
// The same where it must be there: the program ends if it is not.
const char* text_of(Case* c, const char* name);
int int_of(Case* c, const char* name);
double number_of(Case* c, const char* name);
bool flag_of(Case* c, const char* name);
// All of a parameter's whole numbers, and how many; to be freed.
int* ints_of(Case* c, const char* name, size_t* count);
// The same of fractions. Of one number `most` make as many; the program ends at another count.
float* fractions_of(Case* c, const char* name, size_t most);
// A parameter that nothing asked for, or NULL: what is not known must not be ignored.
const char* unread(const Case* c);

#endif
