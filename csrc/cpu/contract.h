// Included before all else: lets a * b + c round once in a file whose results need not be the same bits everywhere.
#pragma once

#if defined(__clang__)
#pragma clang fp contract(fast)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=fast")
#endif
