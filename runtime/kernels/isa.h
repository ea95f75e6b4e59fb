// The instructions that the kernels are compiled for. They are named here, not on the command line,
// so that the rest of the library runs on any x86-64 and can refuse politely.
#pragma once

#pragma GCC target( \
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")
