// Include this first. It lets a * b + c round once in a file whose results need not be bitwise equal everywhere.
#pragma once

#if defined(__clang__)
#pragma clang fp contract(fast)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=fast")
#endif
