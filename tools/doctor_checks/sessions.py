"""The bench of a real job: a bundle's session, and transformers' eager model beside it."""

from functools import cached_property

from trtllm_lite.runtime.backends.base import Session, SessionOptions
from trtllm_lite.runtime.bundle import Bundle, open_bundle
from trtllm_lite.runtime.engines.store import stored_engines
from trtllm_lite.tools.doctor_checks.bench import Facts, ReferenceModel
from trtllm_lite.tools.doctor_checks.jobs import Job
from trtllm_lite.tools.doctor_checks.prepare import needs_bundle
from trtllm_lite.tools.doctor_checks.result import CheckSkippedError
from trtllm_lite.tools.doctor_checks.workshop import Workshop


class JobBench:
    """`Bench` of a job. What was opened is closed by `close`. A session that does not open fails
    the check that needs it first; later ones are skipped."""

    def __init__(self, job: Job, shop: Workshop) -> None:
        self._job = job
        self._shop = shop
        self._opened: Session | None = None
        self._broken = False

    @cached_property
    def _bundle(self) -> Bundle:
        needs_bundle(self._job)
        return open_bundle(self._job.bundle, check_hashes=False)

    @cached_property
    def facts(self) -> Facts:
        job, manifest = self._job, self._bundle.manifest
        files = {file.path: file.size for file in manifest.files}
        return Facts(
            lane=job.lane,
            vocab_size=manifest.model.vocab_size,
            num_slots=job.model.num_slots,
            capacity=job.model.capacity,
            dtype=job.dtype,
            weight_bytes=files[manifest.weights],
            kv_bytes=self.subject.info.kv_bytes_per_token,
            bandwidth=job.bandwidth,
            exact_graphs=self._exact_graphs(),
        )

    def _exact_graphs(self) -> bool:
        """TensorRT-RTX specializes kernels later where a step is not recorded."""
        stored = stored_engines(self._bundle.folder)
        return all(engine.record.key.flavour != "tensorrt_rtx" for engine in stored)

    @cached_property
    def reference(self) -> ReferenceModel:
        needs_bundle(self._job)
        return self._shop.reference(self._job)

    @property
    def subject(self) -> Session:
        if self._broken:
            raise CheckSkippedError("the session did not open: see the first check")
        if self._opened is None:
            model, bundle = self._job.model, self._bundle
            options = SessionOptions(num_slots=model.num_slots, capacity=model.capacity)
            self._broken = True
            self._opened = self._shop.open(bundle, options)
            self._broken = False
        return self._opened

    def close(self) -> None:
        """Idempotent."""
        if self._opened is not None:
            self._opened.close()
        self._opened = None
