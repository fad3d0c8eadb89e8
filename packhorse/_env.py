"""Every environment variable the package reads. Each is read once, at import.

``SWITCHES`` lists ours for ``python -m packhorse doctor``.
"""

import os
from typing import Final

#: Check the values of index tensors on the device (an async assert, no host sync). Off by default.
CHECK_VALUES: Final[bool] = os.environ.get("PACKHORSE_CHECK", "0") == "1"

#: Whether a profiler put itself into this process: these variables name its library, to NVTX and to
#: the driver, which newer releases of NVTX ask too.
PROFILED: Final[bool] = any(
    os.environ.get(name) for name in ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")
)

#: name -> what it does.
SWITCHES: Final[dict[str, str]] = {
    "PACKHORSE_CHECK": "1: check index values on the device, without a host sync",
}
