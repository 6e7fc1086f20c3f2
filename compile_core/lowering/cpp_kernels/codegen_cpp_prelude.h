// What every generated C++ kernel may call: scalar arithmetic with torch's meaning, conversions of 16-bit
// floats, float32 elementary functions, a parallel loop, and the call from Python.
//
// The float32 functions are straight-line code (selects, no branches, no calls), so that g++ vectorises the
// loops they are inlined into. Their polynomials are minimax fits of ours; the reductions of the argument are
// the textbook ones (Muller, "Elementary Functions", 2016, chapters 9 to 11). NaN, infinities and subnormal
// numbers come out right; the bounds in ulp are tested against float64. float64 goes to the C library.
//
// No standard header but <cstdint>: <cmath> alone would cost more to parse than most kernels take to compile.
#include <cstdint>

extern "C" int omp_get_max_threads(void);
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
extern "C" int omp_in_parallel(void);

#define INLINE static inline __attribute__((always_inline))

// ---- bits and fused multiply-add ---------------------------------------------------------------------

INLINE float float_of(int32_t bits) { return __builtin_bit_cast(float, bits); }
INLINE int32_t bits_of(float x) { return __builtin_bit_cast(int32_t, x); }

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else  // the C library's exact fma would cost a hundred times more than its exactness gains here
INLINE float fused(float a, float b, float c) { return a * b + c; }
INLINE double fused(double a, double b, double c) { return a * b + c; }
#endif

// ---- 16-bit floats -----------------------------------------------------------------------------------

INLINE float from_bfloat16(uint16_t x) { return float_of(int32_t(uint32_t(x) << 16)); }
INLINE uint16_t to_bfloat16(float x) {
  uint32_t bits = uint32_t(bits_of(x));
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t(x != x ? 0x7fc0u : rounded);
}
INLINE float from_float16(uint16_t x) {
  uint32_t sign = uint32_t(x & 0x8000u) << 16, rest = uint32_t(x & 0x7fffu) << 13;
  // Scaling by 2^112 moves the exponent and normalises subnormal halves.
  uint32_t scaled = uint32_t(bits_of(float_of(int32_t(rest)) * 0x1p112f));
  return float_of(int32_t(sign | (rest >= 0x0f800000u ? rest | 0x7f800000u : scaled)));
}
INLINE uint16_t to_float16(float x) {
  uint32_t bits = uint32_t(bits_of(x)), sign = bits & 0x80000000u, rest = bits ^ sign;
  uint32_t special = rest > 0x7f800000u ? 0x7e00u : 0x7c00u;
  // Adding 0.5, whose last place is the smallest half, rounds a small number to a multiple of that.
  uint32_t small = uint32_t(bits_of(float_of(int32_t(rest)) + 0.5f)) - 0x3f000000u;
  uint32_t normal = (rest + 0xc8000fffu + ((rest >> 13) & 1u)) >> 13;
  uint32_t half = rest >= 0x47800000u ? special : (rest < 0x38800000u ? small : normal);
  return uint16_t(half | (sign >> 16));
}

// ---- arithmetic with torch's meaning -----------------------------------------------------------------

// Two choices, not one with an "or": g++ makes vectors of them, 40 times as fast in the maximum of a window.
template <class T> INLINE T nan_max(T a, T b) { const T larger = b > a ? b : a; return b != b ? b : larger; }
template <class T> INLINE T nan_min(T a, T b) { const T smaller = b < a ? b : a; return b != b ? b : smaller; }
// Whether b displaces the best a of an argmax or argmin that keeps the first extremum and lets NaN win.
template <class T> INLINE bool displaces_max(T a, T b) { return b > a || (b != b && a == a); }
template <class T> INLINE bool displaces_min(T a, T b) { return b < a || (b != b && a == a); }
// Of functions that look at no errno, g++ makes one of sin(atan(x)), and of cos of it and sinh and cosh of atanh, which is
// 1 for NaN: of what comes out of here it does not know the function.
template <class T> INLINE T of_any_function(T x) {
  asm("" : "+m"(x));
  return x;
}
template <class T> INLINE T sign_of(T x) { return T(T(T(0) < x) - T(x < T(0))); }
template <class T> INLINE T absolute(T x) { return x < T(0) ? T(-x) : x; }
INLINE float absolute(float x) { return __builtin_fabsf(x); }
INLINE double absolute(double x) { return __builtin_fabs(x); }
// What an integer does not hold, NaN too, becomes the least one, as the processor's instruction gives it; the language
// leaves it open, and g++ folds it to other numbers. What is below 1 becomes 0 before it is an integer: of one that is
// a float again g++ makes a truncated float, which would be -0.
template <class T, class F> INLINE T truncated(F x) {
  const F size = absolute(x), past = sizeof(T) == 8 ? F(0x1p63) : F(0x1p31);
  const F whole = size < F(1) ? F(0) : x;
  return T(size < past ? whole : -past);
}

// Division by zero of integers traps on x86; torch raises an error. Generated code yields 0 and reports
// nothing.
// Of an unsigned type, T(-1) is the greatest number.
template <class T> INLINE bool is_minus_one(T b) { return T(-1) < T(0) && b == T(-1); }
template <class T> INLINE T trunc_div(T a, T b) {
  return b == T(0) ? T(0) : (is_minus_one(b) ? T(T(0) - a) : T(a / b));
}
template <class T> INLINE T remainder_of(T a, T b) {
  if (b == T(0) || is_minus_one(b)) return T(0);
  T r = T(a % b);
  return (r != T(0) && ((r < T(0)) != (b < T(0)))) ? T(r + b) : r;
}
template <class T> INLINE T c_remainder(T a, T b) { return (b == T(0) || is_minus_one(b)) ? T(0) : T(a % b); }
template <class T> INLINE T floor_div(T a, T b) {
  T q = trunc_div(a, b);
  return (b != T(0) && T(q * b) != a && ((a < T(0)) != (b < T(0)))) ? T(q - T(1)) : q;
}
INLINE float c_remainder(float a, float b) { return __builtin_fmodf(a, b); }
INLINE double c_remainder(double a, double b) { return __builtin_fmod(a, b); }
template <class T> INLINE T float_remainder(T a, T b) {
  T r = c_remainder(a, b);
  return (r != T(0) && ((r < T(0)) != (b < T(0)))) ? r + b : r;
}
INLINE float remainder_of(float a, float b) { return float_remainder(a, b); }
INLINE double remainder_of(double a, double b) { return float_remainder(a, b); }
// As Python and torch do it: from the exact remainder, so that floor_div(1.0, 0.1) is 9.
template <class T> INLINE T float_floor_div(T a, T b) {
  T r = c_remainder(a, b), q = (a - r) / b;
  q = (r != T(0) && ((b < T(0)) != (r < T(0)))) ? q - T(1) : q;
  T whole = T(__builtin_floor(q));
  whole = (q - whole > T(0.5)) ? whole + T(1) : whole;
  whole = q == T(0) ? T(__builtin_copysign(T(0), a / b)) : whole;
  return b == T(0) ? a / b : whole;
}
INLINE float floor_div(float a, float b) { return float_floor_div(a, b); }
INLINE double floor_div(double a, double b) { return float_floor_div(a, b); }
INLINE float trunc_div(float a, float b) { return __builtin_truncf(a / b); }
INLINE double trunc_div(double a, double b) { return __builtin_trunc(a / b); }
template <class T> INLINE T shift_left(T a, T b) {
  return (b < T(0) || b >= T(8 * sizeof(T))) ? T(0) : T(uint64_t(a) << uint64_t(b));
}
template <class T> INLINE T shift_right(T a, T b) {
  return (b < T(0) || b >= T(8 * sizeof(T))) ? T(a < T(0) ? -1 : 0) : T(a >> b);
}
template <class T> INLINE T integer_power(T base, T exponent) {
  if (exponent < T(0)) return base == T(1) ? T(1) : (base == T(-1) ? (exponent % T(2) ? T(-1) : T(1)) : T(0));
  // Unsigned: what overflows wraps, and the compiler may not conclude the sign of the result from that of the base.
  uint64_t result = 1, power = uint64_t(base);
  for (; exponent > T(0); exponent = T(exponent / T(2)), power *= power)
    if (exponent % T(2)) result *= power;
  return T(result);
}

// ---- random numbers ----------------------------------------------------------------------------------

// Philox 2x32 with ten rounds; see ir/counter_random.py. Its words are kept in 64 bits, where their products are: in
// 32 bits g++ would pack and unpack vectors every round.
INLINE int64_t random_bits(int64_t seed, int64_t position) {
  const uint64_t word = 0xFFFFFFFFu;
  uint64_t key = uint64_t(seed) & word, low = uint64_t(position) & word;
  uint64_t high = (uint64_t(position) ^ uint64_t(seed)) >> 32;
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    uint64_t product = uint64_t(uint32_t(low)) * 0xD256D193u;
    low = (product >> 32) ^ key ^ high;
    high = product & word;
    key = (key + 0x9E3779B9u) & word;
  }
  return int64_t(high << 32 | low);
}

INLINE int32_t random_word(int64_t seed, int64_t position) {
  int64_t bits = random_bits(seed, position >> 1);
  return (position & 1) ? int32_t(bits >> 32) : int32_t(bits);
}

// ---- float32 elementary functions --------------------------------------------------------------------

// (e^r - 1 - r) / r^2 for |r| <= ln(2)/2
INLINE float expm1_tail(float r) {
  float p = fused(1.9944263e-4f, r, 1.3933562e-3f);
  p = fused(p, r, 8.333208e-3f);
  p = fused(p, r, 4.166648e-2f);
  p = fused(p, r, 1.6666667e-1f);
  return fused(p, r, 0.5f);
}
INLINE float clamped(float x, float low, float high) {  // NaN stays
  float y = x > high ? high : x;
  return y < low ? low : y;
}
// y * 2^k for -254 <= k <= 254, in two steps so that neither factor overflows and subnormal results round
// once
INLINE float scaled_by_power_of_two(float y, int32_t k) {
  int32_t half = k >> 1;
  return y * float_of((half + 127) << 23) * float_of((k - half + 127) << 23);
}
INLINE int32_t whole_number(float n) { return n == n ? int32_t(n) : 0; }

INLINE float fast_exp(float x) {
  float c = clamped(x, -104.0f, 89.0f);
  float n = __builtin_rintf(c * 1.44269504f);
  float r = fused(n, -0.693145752f, c);
  r = fused(n, -1.42860677e-6f, r);
  float p = fused(r * r, expm1_tail(r), r) + 1.0f;
  return scaled_by_power_of_two(p, whole_number(n));
}
INLINE float fast_exp2(float x) {
  float c = clamped(x, -151.0f, 129.0f);
  float n = __builtin_rintf(c);
  float r = c - n;
  float p = fused(1.5329264e-4f, r, 1.3390969e-3f);
  p = fused(p, r, 9.618499e-3f);
  p = fused(p, r, 5.5503596e-2f);
  p = fused(p, r, 2.4022648e-1f);
  p = fused(p, r, 6.931472e-1f);
  p = fused(p, r, 1.0f);
  return scaled_by_power_of_two(p, whole_number(n));
}
INLINE float fast_expm1(float x) {
  float c = clamped(x, -30.0f, 89.0f);
  float n = __builtin_rintf(c * 1.44269504f);
  float r = fused(n, -0.693145752f, c);
  r = fused(n, -1.42860677e-6f, r);
  float p = fused(r * r, expm1_tail(r), r);
  float half_power = float_of((whole_number(n) + 126) << 23);  // 2^(n-1): 2^n would overflow for n = 128
  float y = 2.0f * fused(p, half_power, half_power - 0.5f);
  return n == 0.0f ? (x == 0.0f ? x : p) : y;
}
// log(1 + f) - f + f^2/2 for 1 + f in [sqrt(1/2), sqrt(2)], from log((1+s)/(1-s)) with s = f / (2 + f)
INLINE float log_tail(float f) {
  float s = f / (2.0f + f), z = s * s;
  float p = fused(2.4279222e-1f, z, 2.8498787e-1f);
  p = fused(p, z, 4.0000972e-1f);
  p = fused(p, z, 6.666666e-1f);
  return s * fused(p, z, 0.5f * f * f);
}
struct Normalised { float exponent, fraction; };  // x = 2^exponent * (1 + fraction), for positive normal x
INLINE Normalised normalised(float x) {
  int32_t bits = bits_of(x) + (0x3f800000 - 0x3f3504f3);
  int32_t exponent = (bits >> 23) - 127;
  return {float(exponent), float_of((bits & 0x007fffff) + 0x3f3504f3) - 1.0f};
}
// x is where the result is exceptional: log of zero, a negative number, infinity or NaN
INLINE float with_log_exceptions(float y, float x) {
  y = x == __builtin_inff() ? x : y;
  y = x == 0.0f ? -__builtin_inff() : y;
  return x >= 0.0f ? y : __builtin_nanf("");
}
INLINE float fast_log(float x) {
  bool subnormal = x < 1.17549435e-38f;
  Normalised a = normalised(subnormal ? x * 0x1p23f : x);
  float k = a.exponent - (subnormal ? 23.0f : 0.0f), f = a.fraction;
  float y = fused(k, 9.05800061e-06f, log_tail(f)) - 0.5f * f * f + f;
  return with_log_exceptions(fused(k, 6.93138123e-01f, y), x);
}
INLINE float fast_log2(float x) {
  bool subnormal = x < 1.17549435e-38f;
  Normalised a = normalised(subnormal ? x * 0x1p23f : x);
  float k = a.exponent - (subnormal ? 23.0f : 0.0f), f = a.fraction;
  float rest = log_tail(f) - 0.5f * f * f;
  // 1/ln(2) in two parts, f and the rest of the logarithm apart, since the result cancels near x = 1
  float y = fused(f, 1.92596299e-8f, fused(rest, 1.44269502f, f * 0.442695022f)) + f;
  return with_log_exceptions(k + y, x);
}
INLINE float fast_log10(float x) {
  bool subnormal = x < 1.17549435e-38f;
  Normalised a = normalised(subnormal ? x * 0x1p23f : x);
  float k = a.exponent - (subnormal ? 23.0f : 0.0f), f = a.fraction;
  float rest = log_tail(f) - 0.5f * f * f;
  float y = fused(k, 7.90341569e-07f, fused(f, -1.00890504e-8f, rest * 0.434294492f));
  y = fused(f, 0.434294492f, y);
  return with_log_exceptions(fused(k, 3.01029205e-01f, y), x);
}
INLINE float fast_log1p(float x) {
  float u = 1.0f + x;
  // What the rounding of 1 + x lost, relative to u; exact in either order of magnitude (Sterbenz).
  float lost = (x > 1.0f ? 1.0f - (u - x) : x - (u - 1.0f)) / u;
  Normalised a = normalised(u);
  float f = a.fraction;
  lost = (x < 0x1p30f) ? lost : 0.0f;
  float y = f - (0.5f * f * f - (log_tail(f) + fused(a.exponent, 9.05800061e-06f, lost)));
  y = fused(a.exponent, 6.93138123e-01f, y);
  y = with_log_exceptions(y, u);
  return absolute(x) < 0x1p-25f ? x : y;
}
INLINE float fast_sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }
INLINE float fast_tanh(float x) {
  float a = absolute(x);
  float t = fast_expm1(-2.0f * (a > 10.0f ? 10.0f : a));
  return __builtin_copysignf(-t / (t + 2.0f), x);
}
// e^x for -20 <= x <= 0, within 4 ulp: what the complement of a number near 1 needs
INLINE float short_exp(float x) {
  float n = __builtin_rintf(x * 1.44269504f);
  float r = fused(n, -0.693147182f, x);
  float p = fused(1.3938711e-3f, r, 8.367152e-3f);
  p = fused(p, r, 4.1666426e-2f);
  p = fused(p, r, 1.6666539e-1f);
  p = fused(p, r, 0.5f);
  return fused(r * r, p, r + 1.0f) * float_of((whole_number(n) + 127) << 23);
}
INLINE float fast_erf(float x) {
  float a = absolute(x), s = x * x;
  float p = fused(-5.959584e-4f, s, 4.9873525e-3f);
  p = fused(p, s, -2.6762966e-2f);
  p = fused(p, s, 1.1281731e-1f);
  p = fused(p, s, -3.761249e-1f);
  p = fused(p, s, 1.2837915e-1f);
  float near = fused(p, x, x);
  float t = a > 4.0f ? 4.0f : a;  // 1 - erf(4) is below half an ulp of 1
  float q = fused(1.152186e-5f, t, -3.2564966e-4f);
  q = fused(q, t, 3.6537584e-3f);
  q = fused(q, t, -2.378535e-2f);
  q = fused(q, t, 1.0626317e-1f);
  q = fused(q, t, 6.351359e-1f);
  q = fused(q, t, 1.2865217e-1f);
  float far = __builtin_copysignf(1.0f - short_exp(-fused(q, t, t)), x);
  return a < 0.925f ? near : far;
}
// The number of quarter turns in x, modulo 4, in units of 2^-62, for 2^40 <= |x|: the product of its fraction with those
// bits of 2/pi of which something is left (Payne and Hanek, 1983).
INLINE uint64_t quarter_turns(float x) {
  int32_t start = ((bits_of(x) >> 23) & 255) - 152;
  uint64_t shift = uint64_t(start & 63);
  bool later = start > 63;
  uint64_t a = later ? 0xfc2757d1f534ddc0 : 0xa2f9836e4e441529, b = later ? 0xdb6295993c439041 : 0xfc2757d1f534ddc0;
  uint64_t c = later ? 0xfe5163abdebbc561 : 0xdb6295993c439041;
  uint64_t head = (a << shift) | ((b >> 1) >> (63 - shift)), rest = (b << shift) | ((c >> 1) >> (63 - shift));
  uint64_t fraction = uint64_t((bits_of(x) & 0x007fffff) | 0x00800000);
  uint64_t turns = fraction * head + ((fraction * (rest >> 32)) >> 32);
  return bits_of(x) < 0 ? -turns : turns;
}
// sin(x + quadrant * pi/2), with the reduction in float64 below 2^40.
INLINE float sine_from_quadrant(float x, int64_t quadrant) {
  double wide = double(x), n = __builtin_rint(wide * 0.63661977236758134308);
  double r = fused(n, -1.57079632679489655800, wide);
  r = fused(n, -6.12323399573676603587e-17, r);
  uint64_t turns = quarter_turns(x), nearest = (turns + (uint64_t(1) << 61)) >> 62;
  bool is_far = absolute(x) >= 0x1p40f;
  double far = double(int64_t(turns - (nearest << 62))) * (0x1p-62 * 1.57079632679489655800);
  int64_t q = (is_far ? int64_t(nearest) : int64_t(n)) + quadrant;
  float f = float(is_far ? far : r), s = f * f;
  float sine = fused(-1.9516832e-4f, s, 8.332183e-3f);
  sine = fused(fused(sine, s, -1.6666655e-1f), s * f, f);
  float cosine = fused(2.4431201e-5f, s, -1.3887304e-3f);
  cosine = fused(fused(cosine, s, 4.1666646e-2f), s * s, fused(s, -0.5f, 1.0f));
  float y = (q & 1) ? cosine : sine;
  y = (q & 2) ? -y : y;
  y = clamped(y, -1.0f, 1.0f);
  return absolute(x) < __builtin_inff() ? y : __builtin_nanf("");
}
INLINE float fast_sin(float x) { return x == 0.0f ? x : sine_from_quadrant(x, 0); }
INLINE float fast_cos(float x) { return sine_from_quadrant(x, 1); }

// ---- gathers and parallel loops ----------------------------------------------------------------------

// For indices made of truth values: g++ 12 takes the mask of a vector, whose true is -1, for them.
INLINE int64_t not_of_a_vector(int64_t index) {
  asm("" : "+r"(index));
  return index;
}

// A checked index: one out of range sets `bad` and reads element 0 instead.
INLINE int64_t checked_index(int64_t index, int64_t size, bool active, int &bad) {
  bool outside = uint64_t(index) >= uint64_t(size);
  bad |= int(outside & active);
  return outside ? 0 : index;
}
// Negative ones count from the end.
INLINE int64_t wrapped_index(int64_t index, int64_t size, bool active, int &bad) {
  return checked_index(index < 0 ? index + size : index, size, active, bad);
}

// Calls body(begin, end) on ranges that cover [0, count), one a thread, none below `grain` items. The number
// of threads is torch's: torch.set_num_threads sets the same OpenMP runtime. One thread means a plain call,
// no parallel region; the compiler is not to know that range, or it makes a copy of the body for it and, where that
// is one unit, drops the loop of units and with it what says that the sums in it may be vectorised.
template <class Body> INLINE int parallel_ranges(int64_t count, int64_t grain, Body body) {
  int64_t threads = 1;
  if (count > grain) {
    int64_t wanted = (count + grain - 1) / grain, most = omp_in_parallel() ? 1 : omp_get_max_threads();
    threads = wanted < most ? wanted : most;
  }
  if (threads <= 1) {
    int64_t begin = 0;
    asm("" : "+r"(begin), "+r"(count));
    return body(begin, count);
  }
  int status = 0;
#pragma omp parallel num_threads(int(threads)) reduction(| : status)
  {
    int64_t rank = omp_get_thread_num(), all = omp_get_num_threads();
    status |= body(count * rank / all, count * (rank + 1) / all);
  }
  return status;
}

// ---- the call from Python ----------------------------------------------------------------------------

// Declared here, not included: an interpreter need not come with its headers, and these few are stable. A
// kernel is a builtin function made from its PyMethodDef, which takes each buffer as a tensor or as the integer
// of its data_ptr(), and after that a function of C of the array of addresses.
extern "C" {
struct PyObject;
struct PyTypeObject;
extern PyTypeObject PyLong_Type;
extern PyObject *PyExc_IndexError, *PyExc_TypeError, _Py_NoneStruct;
int PyObject_IsInstance(PyObject *, PyObject *);
void *PyLong_AsVoidPtr(PyObject *);
PyObject *PyErr_Occurred(void);
void PyErr_SetString(PyObject *, const char *);
PyObject *PyUnicode_InternFromString(const char *);
PyObject *PyObject_VectorcallMethod(PyObject *, PyObject *const *, uintptr_t, PyObject *);
void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *);
}
typedef PyObject *(*FastFunction)(PyObject *, PyObject *const *, intptr_t);
struct MethodDefinition {
  const char *name;
  FastFunction function;
  int flags;
  const char *documentation;
};
struct KernelDefinition {
  MethodDefinition method;
  int (*run)(void **);
};
enum { METH_FASTCALL_FLAG = 0x0080 };

static bool read_pointers(PyObject *const *arguments, intptr_t given, intptr_t expected, void **pointers) {
  static PyObject *method = PyUnicode_InternFromString("data_ptr");
  if (given != expected) {
    PyErr_SetString(PyExc_TypeError, "a kernel takes one tensor or address for each of its buffers");
    return false;
  }
  for (intptr_t i = 0; i < expected; ++i) {
    if (PyObject_IsInstance(arguments[i], (PyObject *)&PyLong_Type) == 1) {
      pointers[i] = PyLong_AsVoidPtr(arguments[i]);
    } else {
      PyObject *address = PyObject_VectorcallMethod(method, arguments + i, 1, nullptr);
      if (!address) return false;
      pointers[i] = PyLong_AsVoidPtr(address);
      Py_DecRef(address);
    }
    if (!pointers[i] && PyErr_Occurred()) return false;
  }
  return true;
}
static PyObject *finished(int status) {
  if (status) {
    PyErr_SetString(PyExc_IndexError, "index out of range in a compiled gather (embedding, index_select)");
    return nullptr;
  }
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}
