// The part of OpenMP's interface that TorchInductor's generated code calls, for compilers that come without a header of
// their own. Declarations follow the OpenMP API specification 5.2, chapter 18; the functions are those of torch's library.
#pragma once
#ifdef __cplusplus
extern "C" {
#endif
int omp_get_thread_num(void);
int omp_get_num_threads(void);
int omp_get_max_threads(void);
int omp_in_parallel(void);
void omp_set_num_threads(int);
#ifdef __cplusplus
}
#endif
