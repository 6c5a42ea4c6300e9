"""The connector that serves ``ExampleConnector`` for block-diffusion models.

vLLM's own class of that name cannot keep the rule of `startup.kv_transfer`: it writes all pages of
a prompt after the first chunk, addresses them by tokens alone, and ends the engine where a page is
missing or truncated. The class here has the same name and option (``shared_storage_path``):

- a page is saved in the step after which every token of it is computed, and only if it holds
  tokens of the prompt alone. Such a page consists of whole blocks, whose keys and values are final;
- a request joins a batch once its pages have been loaded. So a failed load is known before
  anything has been computed with the page, and vLLM's ``kv_load_failure_policy`` applies.

Prompts whose keys and values depend on more than tokens (images, a LoRA adapter) are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger

from vllm_dllm.kv_transfer.pages import (
    PageError,
    fingerprint,
    is_finite,
    load_page,
    page_addresses,
    page_of,
    save_page,
)

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.dllm")


@dataclass(frozen=True)
class SavedPage:
    """A page of the KV cache by its index `block`, and its file, which need not exist yet."""

    file: Path
    address: str
    block: int


@dataclass
class PageTransfers(KVConnectorMetadata):
    """A worker's transfers in one step: pages to save after it, and pages to load, by request."""

    saves: list[SavedPage] = field(default_factory=list)
    loads: dict[str, list[SavedPage]] = field(default_factory=dict)


@dataclass
class Prompt:
    """A request whose pages may leave or enter, as the scheduler knows it.

    Attributes:
        addresses: the addresses of the whole pages of its prompt.
        offered: the pages that were found in files: the first, and the one after the last.
        saved: how many pages have been given to the worker to save.
        gave_up: whether a load has failed, so that its pages are computed from now on.
    """

    addresses: list[str]
    offered: tuple[int, int] = (0, 0)
    saved: int = 0
    gave_up: bool = False


class ExampleConnector(KVConnectorBase_V1):
    """Saves whole pages of prompts as files and loads them. vLLM finds the class by its name."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(
                "--kv-transfer-config: pages of several sizes are not transferred; set "
                "--disable-hybrid-kv-cache-manager"
            )
        transfer = self._kv_transfer_config
        self.saves, self.loads = transfer.is_kv_producer, transfer.is_kv_consumer
        self.page = vllm_config.cache_config.block_size
        self.pages = kv_cache_config.num_blocks
        if role == KVConnectorRole.SCHEDULER:
            self.server = fingerprint(vllm_config)
            path = transfer.get_from_extra_config("shared_storage_path", "/tmp")
            self.folder = Path(path) / self.server
            logger.info("dllm: pages of prompts are in %s", self.folder)
        self.prompts: dict[str, Prompt] = {}
        self.to_load: dict[str, list[SavedPage]] = {}
        # The worker's state: pages by layer, requests whose loads have ended, and pages without
        # content.
        self.caches: dict[str, torch.Tensor] = {}
        self.received: set[str] = set()
        self.failed: set[int] = set()

    # The following methods run in the scheduler.

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Count the tokens after those in the KV cache that can be loaded."""
        known = self._prompt(request)
        first = num_computed_tokens // self.page
        # vLLM needs at least one token to compute.
        most = min(len(known.addresses), (request.num_tokens - 1) // self.page)
        last = first
        while self.loads and not known.gave_up and last < most:
            if not self._file(known.addresses[last]).is_file():
                break
            last += 1
        known.offered = first, last
        return (last - first) * self.page, last > first

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        """Note the pages of a request that is about to be loaded."""
        known = self._prompt(request)
        if num_external_tokens == 0:
            return
        first, last = known.offered
        assert num_external_tokens == (last - first) * self.page
        (ids,) = blocks.get_block_ids()
        self.to_load[request.request_id] = [
            self._saved(known.addresses[n], ids[n]) for n in range(first, last)
        ]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PageTransfers:
        """List the pages that the worker saves and loads in this step."""
        loads, self.to_load = self.to_load, {}
        saves = list(self._completed(scheduler_output)) if self.saves else []
        return PageTransfers(saves, loads)

    def update_connector_output(self, connector_output: Any) -> None:
        """Load nothing more for requests that have a page which could not be loaded."""
        if not connector_output.invalid_block_ids:
            return
        # Only vLLM's scheduler knows which request is affected; it is one of these.
        for request_id in connector_output.finished_recving or ():
            if request_id in self.prompts:
                self.prompts[request_id].gave_up = True

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a request, whose pages are in files already."""
        self.prompts.pop(request.request_id, None)
        self.to_load.pop(request.request_id, None)
        return False, None

    def _prompt(self, request: Request) -> Prompt:
        known = self.prompts.get(request.request_id)
        if known is None:
            more = request.mm_features or request.lora_request or not request.prompt_token_ids
            tokens = [] if more else request.prompt_token_ids
            addresses = page_addresses(self.server, request.cache_salt, tokens, self.page)
            known = self.prompts[request.request_id] = Prompt(addresses)
        return known

    def _completed(self, scheduler_output: SchedulerOutput) -> Iterator[SavedPage]:
        """The pages of prompts whose tokens are all computed after this step."""
        assert self._kv_cache_manager is not None
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            known = self.prompts.get(request_id)
            if known is None or known.saved == len(known.addresses):
                continue
            end = min((computed[request_id] + tokens) // self.page, len(known.addresses))
            (ids,) = self._kv_cache_manager.get_block_ids(request_id)
            for n in range(known.saved, end):
                yield self._saved(known.addresses[n], ids[n])
            known.saved = max(known.saved, end)

    def _saved(self, address: str, block: int) -> SavedPage:
        return SavedPage(self._file(address), address, block)

    def _file(self, address: str) -> Path:
        return self.folder / address[:2] / f"{address}.safetensors"

    # The following methods run in the worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV cache of each layer, ``[pages, ...]``.

        Raises:
            ValueError: an attention backend has split vLLM's pages.
        """
        for name, cache in kv_caches.items():
            if cache.shape[0] != self.pages:
                raise ValueError(
                    f"--kv-transfer-config: the attention backend of {name} divides pages of "
                    f"{self.page} tokens; choose another with --attention-backend, or remove it"
                )
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load pages. If a page cannot be loaded, the pages after it stay without content, too."""
        for request_id, pages in self._transfers().loads.items():
            self.received.add(request_id)
            for n, page in enumerate(pages):
                try:
                    self._load(page)
                except PageError as error:
                    logger.error(
                        f"dllm: a page of request {request_id} is not loaded, and its file "
                        f"{page.file} is removed: {error}"
                    )
                    self.failed.update(one.block for one in pages[n:])
                    try:
                        page.file.unlink(missing_ok=True)  # so that the page is saved again
                    except OSError as failure:
                        logger.error("dllm: %s could not be removed: %s", page.file, failure)
                    break

    def _load(self, page: SavedPage) -> None:
        like = {name: cache[page.block] for name, cache in self.caches.items()}
        for name, tensor in load_page(page.file, page.address, like).items():
            self.caches[name][page.block].copy_(tensor)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests join a batch when all layers have been loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: pages are saved with all their layers after the step."""

    def wait_for_save(self) -> None:
        """Save the pages that this step has completed, before another step can change them."""
        for page in self._transfers().saves:
            if page.file.is_file():
                continue
            content = page_of(self.caches, page.block)
            if not is_finite(content):
                logger.error("dllm: a page with NaN or infinities is not saved")
                continue
            try:
                save_page(page.file, page.address, content)
            except OSError as error:
                logger.error("dllm: %s could not be saved: %s", page.file, error)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """The requests whose pages have been loaded, or could not be."""
        received, self.received = self.received, set()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The indices in the KV cache of pages that could not be loaded."""
        failed, self.failed = self.failed, set()
        return failed

    def _transfers(self) -> PageTransfers:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, PageTransfers)
        return transfers
