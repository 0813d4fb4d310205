"""Bisect each error of the catalogue, and rate whether the report names the place of the error.

docs/reference/located_errors.md has the results. `python -m tests.power.measure` writes it with the other
tables, `python -m tests.power.locate` alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megalite.config import Config
from megalite.distributed.local_ranks import RankError
from megalite.distributed.topology import Topology
from megalite.observe.verify.layouts import Layout
from megalite.observe.verify.trace_run import RankTrace, trace_rank
from megalite.observe.verify.verification import Location, locate_difference
from megalite.train.run_context import Providers
from megalite.utils.errors import UserError
from tests.live_ranks import RANKS, run_ranks
from tests.power.catalogue import CATALOGUE
from tests.power.injected_error import InjectedError
from tests.power.measure import (
    BY_NAME,
    GLOBAL_BATCH_SIZE,
    NUM_ITERATIONS,
    PROVIDERS,
    config_of,
    write_page,
)
from tests.power.measure import PAGE as INJECTED_ERRORS

SUMMED = r"after its sum over dp \("
MISSING_DP, MISSING_TP = (f"a sum over {axis} is missing" for axis in ("dp", "tp"))
PROJECTION = r"output of layers\.0\.attention\.projection"
MATRIX = r"^weight layers\.\d\.(attention|mlp)\..*weight after the update"
OF_SQUARES = rf"all-reduce over tp of \[32, 2, 1, 1\]|{MISSING_TP}"
SAVED = r"gradient of the (input of layers\.0\.mlp\.activate|output of layers\.0\.mlp\.(up|project_up))"
"""The first gradient in the only offloaded layer that needs a large saved tensor, the input of GELU."""
WHOLE = ""
"""Matches any report: the name of a tensor is also that of the operator that computes it."""

ATTEND, LATER_ATTEND = (rf"layers\.{layers}\.attention\.(attend|keep_own_tokens)" for layers in ("0", "[12]"))
KEY_GRADIENT = r"gradient of the output.* of layers\.\d\.attention\.(qkv|queries_keys_values)"
RECURRED = r"layers\.0\.mamba\.(recur|keep_own_tokens|projection)"
REACHED, LATER_REACHED = (
    rf"layers\.{layers}\.attention\.(attend|reach_keys|keep_own_tokens)" for layers in ("0", "[12]")
)

PLACES: dict[str, tuple[str, str]] = {
    "gradients are not summed over replicas": (SUMMED, MISSING_DP),
    "gradients are means over replicas": (SUMMED, "mean over dp|all-reduce over dp"),
    "gradients are summed twice over replicas": (SUMMED, "all-reduce over dp"),
    "gradients are summed over tp instead of replicas": (SUMMED, "no reduction over dp|all-reduce over tp"),
    "gradients of biases and norms are not summed over replicas": (SUMMED, MISSING_DP),
    "gradients are summed over replicas in fp32": (SUMMED, "all-reduce over dp"),
    "gradients are summed over replicas in bf16": (SUMMED, "all-reduce over dp"),
    "gradients are not reduce-scattered": (SUMMED, f"{MISSING_DP}|no reduction over dp"),
    "a rank receives the shard of another one": (SUMMED, "reduce-scatter over dp"),
    "groups of shards are not summed": (SUMMED, "all-reduce over dp_replicate|sum over dp_replicate"),
    "a shard holds the last microbatch only": (SUMMED, "reduce-scatter over dp"),
    "a shard keeps the sum of the iteration before": (SUMMED, "reduce-scatter over dp"),
    "updated weights are not gathered": ("^weight .* after the update", "not gathered|all-gather over dp"),
    "weights are gathered before the update": ("^weight .* after the update", "all-gather over dp"),
    "gathered weights are those of another rank": (r"output of embedding\.word", "all-gather over dp"),
    "input gradients of column layers are not summed": ("gradient of the input of losses_of", MISSING_TP),
    "row layers are not summed": (PROJECTION, MISSING_TP),
    "all sums of linear layers are means": (PROJECTION, "all-reduce over tp"),
    "all sums of linear layers run twice": (PROJECTION, "all-reduce over tp"),
    "sums of linear layers are in fp32": (PROJECTION, "all-reduce over tp"),
    "sums of linear layers are over the replicas": (
        PROJECTION, r"all-reduce over dp|sum over tp is missing"),
    "the first of three parts of a sum is missing": (
        PROJECTION, "all-reduce over tp"),
    "every rank adds a row layer's bias": (r"attention\.projection\.bias", WHOLE),
    "word embeddings are not summed": (r"output of embedding\.word", MISSING_TP),
    "tokens of other ranks look up their first row": (r"output of embedding\.word", WHOLE),
    "the maximum of the logits is not reduced": ("losses_of", r"all-reduce over tp of \[64\]|maximum"),
    "the sums of the cross-entropy are not reduced": ("losses_of", rf"over tp of \[2, 64\]|{MISSING_TP}"),
    "the sums of the cross-entropy are means": ("losses_of", r"all-reduce over tp of \[2, 64\]"),
    "a target's column is off by one after the first rank": ("losses_of", WHOLE),
    "the gradient of shared keys and values is not summed": (
        r"gradient of the output of layers\.3\.attention\.qkv", f"reduce-scatter over tp|{MISSING_TP}"),
    "queries of a shared group are those of another rank": (
        r"output of layers\.0\.attention\.queries_keys_values", WHOLE),
    "every rank has the ALiBi slopes of the first heads": (ATTEND, WHOLE),
    "partial gradients are not summed": ("after all sums", MISSING_TP),
    "partial gradients are means": ("after all sums", "all-reduce over tp|mean over tp"),
    "partial gradients are summed twice": ("after all sums", "all-reduce over tp"),
    "gradients of LayerNorm's weight are not summed": (r"^gradient of .*norm\.weight", MISSING_TP),
    "gradients of LayerNorm's bias are not summed": (r"^gradient of .*norm\.bias", MISSING_TP),
    "gradients of RMSNorm are not summed": (r"^gradient of .*norm\.weight", MISSING_TP),
    "gradients of LayerNorm after the embedding are not summed": (r"^gradient of .*norm\.weight", MISSING_TP),
    "gradients of post-norm are not summed": (r"^gradient of .*norm\.(weight|bias)", MISSING_TP),
    "gradients of row layers' biases are not summed": (r"^gradient of .*(down|projection)\.bias", MISSING_TP),
    "gradients of the position table are not summed": (r"^gradient of embedding\.position", MISSING_TP),
    "gradients of the token types are not summed": (r"^gradient of embedding\.token_type", MISSING_TP),
    "gradients of BERT's heads are not summed": (r"^gradient of (order_head|token_head)\.", MISSING_TP),
    "input gradients are cut instead of reduce-scattered": (
        PROJECTION, f"reduce-scatter over tp|{MISSING_TP}"),
    "sums over slices are means": (PROJECTION, "reduce-scatter over tp"),
    "slices of the sequence are gathered in another order": (
        r"output of layers\.0\.attention\.qkv", "all-gather over tp"),
    "positions of a slice count from 0": (r"output of embedding\.position", WHOLE),
    "a slice looks up the position ids of the first slice": (r"output of embedding\.position", WHOLE),
    "every rank adds BERT's order loss": ("sop_loss", "all-reduce over tp"),
    "queries of a slice see the keys of the first slice": (ATTEND, WHOLE),
    "documents of a slice are off by one": (ATTEND, WHOLE),
    "rotary positions of a slice count from 0": (REACHED, WHOLE),
    "gradients of gathered keys are cut instead of reduce-scattered": (
        KEY_GRADIENT, "reduce-scatter over cp|a sum over cp is missing"),
    "gradients of gathered keys are means": (KEY_GRADIENT, "mean over cp"),
    "slices of keys are gathered in another order": (REACHED, "all-gather over cp"),
    "heads return in the order of another rank": (ATTEND, "all-to-all over cp"),
    "exchanged heads have the ALiBi slopes of the first ones": (ATTEND, WHOLE),
    "a block of a ring sees later keys": (ATTEND, WHOLE),
    "queries of a ring do not see the slice before theirs": (ATTEND, WHOLE),
    "rotary positions of zigzag slices are consecutive": (REACHED, WHOLE),
    "hidden states of zigzag slices have consecutive positions": (r"output of embedding\.position", WHOLE),
    "results of a ring are merged without their weights": (ATTEND, WHOLE),
    "keys of a ring arrive one token later than their values": (ATTEND, "(send|receive) over cp"),
    "sinks of a ring count twice": (ATTEND, WHOLE),
    "slices of ranks that exchange heads stay in the order of the ranks": (
        ATTEND, "all-to-all over cp_heads"),
    "tokens of the only layer that exchanges heads stay in the order of the ranks": (
        r"layers\.1\.attention\.(attend|reach_keys|keep_own_tokens)", "all-to-all over cp"),
    "exchanged heads of a ring have the ALiBi slopes of the first ones": (ATTEND, WHOLE),
    "the divisor counts the tokens of a slice": ("number of tokens that divides", WHOLE),
    "tokens with a loss are counted on a slice": ("^lm_loss, the mean", WHOLE),
    "gradients of experts are not summed over their replicas": (SUMMED, "sum over e?dp is missing"),
    "gradients of experts are means over their replicas": (SUMMED, "mean over edp|all-reduce over edp"),
    "gradients of experts are divided by the ranks that send tokens": (
        r"gradient of .*mlp.*before its sum over the ranks", WHOLE),
    "tokens go to the experts of the next rank": (r"layers\.0\.mlp\.transform", "all-to-all over ep"),
    "gathered tokens' outputs return to the next rank": (
        r"layers\.0\.mlp\.transform", "reduce-scatter over ep"),
    "sums over slices of an expert's width are means": (r"layers\.0\.mlp\.transform", WHOLE),
    "the norm counts the experts of one rank": ("the gradient norm", WHOLE),
    "the balance loss is that of a microbatch": ("load_balancing_loss, the sum", WHOLE),
    "experts drop tokens as if all slices were the own one": (r"layers\.0\.mlp\.transform", WHOLE),
    "an expert has a capacity for the microbatch": (r"layers\.0\.mlp\.transform", WHOLE),
    "jitter is keyed by the position in the slice": (r"layers\.0\.mlp\.router\.jitter", WHOLE),
    "a router counts the rows of its slice": (
        "load_balancing_loss, the sum", f"all-reduce over tp|{MISSING_TP}"),
    "a router's losses are those of its slice": ("load_balancing_loss, the sum", MISSING_TP),
    "gradients of the router are not summed": (r"^gradient of .*router\.weight", MISSING_TP),
    "gradients of the router's bias are not summed": (r"^gradient of .*router\.bias", MISSING_TP),
    "gradients of the projections of experts' latents are not summed": (
        r"^gradient of .*mlp\.(to|from)_latent\.weight", MISSING_TP),
    "gradients of a router's scales are not summed": (
        r"^gradient of .*experts\.router\.(expert_)?scale", MISSING_TP),
    "each rank with a slice of an expert adds its bias": (r"^gradient of layers\.3\.mlp\.down\.bias", WHOLE),
    "gradients of a shared expert's gate are not summed": (
        r"^gradient of layers\.\d\.mlp\.shared\.gate\.weight", MISSING_TP),
    "gradients of the gates of layers' own embeddings are not summed": (
        r"^gradient of .*(layer_projection|embedding_gate\.(gate|projection))\.weight", MISSING_TP),
    "ranks after the first have a shared expert without its gate": (
        r"output( \d)? of layers\.0\.mlp\.(shared|transform)", WHOLE),
    "attention dropout is keyed by the local head": (ATTEND, WHOLE),
    "dropout is keyed by the position in the slice": (r"output of embedding\.dropout", WHOLE),
    "dropout is keyed by the index in the microbatch": ("sample_numbers of the microbatch", WHOLE),
    "dropout is keyed by the samples of the rank": ("sample_numbers of the microbatch", WHOLE),
    "dropout is keyed by the layer's number in the stage": (LATER_ATTEND, WHOLE),
    "recomputation draws other masks": (r"layers\.\d\.(mlp_norm|attention_output_dropout)", WHOLE),
    "slices of initial weights begin at element 0": (r"^weight .* before iteration 1", WHOLE),
    "slices of initial columns are drawn as rows": (r"^weight .* before iteration 1", WHOLE),
    "every stage has a seed of its own": (r"^weight .* before iteration 1", WHOLE),
    "the copies of a tied embedding are not summed": (
        r"gradient of embedding\.word\.weight", "a sum over pp is missing"),
    "the copies of a tied embedding are averaged": (
        r"gradient of embedding\.word\.weight", "(mean|send|receive) over pp"),
    "embeddings for later layers have a gradient of 0": (
        r"^gradient of the output \d of embedding ", "(send|receive) over pp"),
    "later stages have the embeddings for layers in another order": (
        r"^input of layers\.2\.embedding_gate\.projection", "receive over pp"),
    "a rank's heads decay at the rates of other heads": (RECURRED, WHOLE),
    "decay rates have the gradient of the first replica's samples": (r"layers\.\d\.mamba\.A_log", WHOLE),
    "a rank's heads have the time steps of other heads": (RECURRED, WHOLE),
    "time-step biases have the gradient of the first replica's samples": (
        r"layers\.\d\.mamba\.dt_bias", WHOLE),
    "every rank adds the inputs of all heads": (RECURRED, WHOLE),
    "the gated norm is over all groups of a rank": (RECURRED, WHOLE),
    "decay rates have the gradient of the first slice's heads": (r"layers\.\d\.mamba\.A_log", WHOLE),
    "skips of Mamba-2 have their gradient once for each slice": (r"layers\.\d\.mamba\.D", WHOLE),
    "states of Mamba-2 on later stages go on after a document's end": (
        r"layers\.2\.mamba\.(recur|projection)", WHOLE),
    "windows follow the layer's number in the stage": (LATER_ATTEND, WHOLE),
    "the last stage has the labels of another microbatch": ("of the microbatch", WHOLE),
    "the last stage's labels are shifted by one": ("labels of the microbatch", WHOLE),
    "a stage reads the message before": (r"input of layers\.2 ", "(send|receive) over pp"),
    "hidden states are rounded to fp32 between stages": (r"input of layers\.2 ", "(send|receive) over pp"),
    "gradients between stages are doubled": (r"gradient of the output of layers\.1 ", "receive over pp"),
    "the last stored weight gradient is dropped": ("before its sum over the ranks", WHOLE),
    "both copies of a tied embedding count": ("the gradient norm", WHOLE),
    "every tp rank counts what is replicated": ("the gradient norm", WHOLE),
    "every replica counts its whole bucket": ("the gradient norm", WHOLE),
    "squares are summed over the replicas only": (
        "the gradient norm", "all-reduce over pp|sum over pp is missing"),
    "squares are means over all ranks": ("the gradient norm", "all-reduce over dp"),
    "clipping divides the norm by the replicas": ("after the update", WHOLE),
    "the logged loss is not summed": ("^lm_loss, the mean", MISSING_DP),
    "the logged loss is a mean over replicas": ("^lm_loss, the mean", "mean over dp|all-reduce over dp"),
    "the divisor counts the rank's samples": ("number of tokens that divides", WHOLE),
    "the divisor counts one microbatch": ("number of tokens that divides", WHOLE),
    "the order loss is divided by the rank's samples": ("number of samples that divides", WHOLE),
    "masked tokens are counted on the rank": ("number of tokens that divides", MISSING_DP),
    "tokens with a loss are counted on the rank": ("^lm_loss, the mean", MISSING_DP),
    "a loss is a mean over the microbatch's tokens": ("^lm_loss, the sum over the microbatches", WHOLE),
    "all replicas read the same samples": ("of the microbatch", WHOLE),
    "replicas read overlapping samples": ("of the microbatch", WHOLE),
    "the last microbatch repeats the one before": ("of the microbatch", WHOLE),
    "a microbatch overwrites the gradient before": ("before its sum over the ranks", WHOLE),
    "gradients keep the sum of the iteration before": ("before its sum over the ranks", WHOLE),
    "the learning rate grows with the replicas": ("after the update", WHOLE),
    "only the first replica counts its shard in the norm": ("the gradient norm", WHOLE),
    "weights are those of the first gathering": (
        r"output of (layers\.\d\.attention\.qkv|embedding\.word) ", "all-gather over dp"),
    "the input gradient of the output layer is not summed": (
        "gradient of the input of losses_of", MISSING_TP),
    "biases have weight decay after the first rank": (
        r"^weight .*(norm\.weight|bias) after the update", WHOLE),
    "a rank gets another rank's slice of the word embeddings": (
        r"output of embedding\.word", "reduce-scatter over tp"),
    "the gradient of the order loss is multiplied by tp": (
        "gradient of the output of order_head", "(two sums|all-reduce) over tp"),
    "recomputation drops nothing": (r"layers\.\d\.(mlp_norm|attention_output_dropout)", WHOLE),
    "a message overtakes the one before": (r"input of layers\.2 ", "(send|receive) over pp"),
    "cut parameters count on the first tp rank only": ("the gradient norm", WHOLE),
    "each rank clips by the norm of its own gradients": (
        "the gradient norm", "all-reduce over pp|sum over pp is missing"),
    "the order loss is a mean over the microbatch's samples": ("^sop_loss, the sum over the micro", WHOLE),
    "biases have weight decay": (r"^weight .*(norm\.weight|bias) after the update", WHOLE),
    "the bias correction is one step late": ("^weight .* after the update", WHOLE),
    "later stages have the learning rate of a later step": (
        r"^weight (layers\.[23]|final_norm|embedding\.word)\..* after the update", WHOLE),
    "they have no tokens, with windows": (LATER_ATTEND, WHOLE),
    "they have no tokens, with ALiBi": (LATER_ATTEND, WHOLE),
    "they do not know the documents": ("document_ids of the microbatch", WHOLE),
    "their dropout is keyed by the samples of another microbatch": (
        "sample_numbers of the microbatch", WHOLE),
    "they double the gradients that they pass on": (
        r"gradient of the output of layers\.1 ", "receive over pp"),
    "their gradients are not counted in the norm": ("the gradient norm", WHOLE),
    "they skip the update": (r"^weight layers\.[12]\..* after the update", WHOLE),
    "they skip their layers": (r"layers\.1\b", WHOLE),
    "two of them exchange their layers": (r"input of layers\.[12] ", WHOLE),
    "the last chunk has another microbatch": ("of the microbatch", WHOLE),
    "the last chunk scales its losses twice": ("gradient of the output of losses_of", WHOLE),
    "the tip of the V reads the output before": (r"input of layers\.2 ", WHOLE),
    "weight gradients of the second chunk are not computed": (
        r"^gradient of (layers\.[23]|embedding\.word)\..*before its sum", WHOLE),
    "a rank with the first and the last stage has two copies of a tied embedding": (
        r"gradient of embedding\.word\.weight", WHOLE),
    "the last stage has the scale of the next step": ("gradient of the output of losses_of", WHOLE),
    "one replica has the scale of the next step": ("gradient of the output of losses_of", WHOLE),
    "half of a storage is copied to the host": (SAVED, WHOLE),
    "a layer gets the activations before": (SAVED, WHOLE),
    "views of a copied storage begin at its start": (
        r"gradient of the (input( \d)? of layers\.0\.attention\.(attend|core)|"
        r"output( \d)? of layers\.0\.attention\.(qkv|queries_keys_values|query_norm|key_norm))", WHOLE),
    "offloaded weights have no weight decay": ("^weight .* after the update", WHOLE),
    "offloaded states have the learning rate of another step": ("^weight .* after the update", WHOLE),
    "every rank holds the first slice of a buffer": (r"layers\.0\.scale", WHOLE),
    "a recomputed forward counts again in a buffer": (r"layers\.\d\.seen after the update", WHOLE),
    "the cross-entropy gets the logits of all ranks as its slice": (
        "gradient of the input of losses_of", WHOLE),
    "a rank orthogonalizes its slice of a matrix": (MATRIX, WHOLE),
    "a rank orthogonalizes its ZeRO shard of a matrix": (MATRIX, WHOLE),
    "a fused weight of which a rank has a slice is one matrix": (
        r"^weight layers\.\d\.attention\.qkv\.weight after the update", WHOLE),
    "an update has the scale of a slice": (r"^weight layers\.\d\.mlp\.up\.weight after the update", WHOLE),
    "other ranks' momentum is not exchanged": (MATRIX, "all-to-all over dp"),
    "the last matrix of a rank is not orthogonalized": (MATRIX, WHOLE),
    "the last matrix of a rank is orthogonalized twice": (MATRIX, WHOLE),
    "ranks share the matrices out in different ways": (MATRIX, "all-to-all over dp"),
    "gradients of the norms of queries and keys are not summed": (
        r"^gradient of .*(query|key)_norm\.weight", MISSING_TP),
    "gradients of a norm over all heads are not summed": (
        r"^gradient of .*(query|key)_norm\.weight", MISSING_TP),
    "a norm over all heads uses the rank's heads alone": (
        r"output of layers\.0\.attention\.query_norm", OF_SQUARES),
    "the gradient of a norm over all heads is that of the rank's heads": (
        r"gradient of the input of layers\.3\.attention\.(query|key)_norm", OF_SQUARES),
    "a rank's queries, keys and values have the bias of another rank": (
        r"^gradient of layers\.\d\.attention\.qkv\.bias", WHOLE),
    "rotary frequencies are scaled on the first stage only": (LATER_REACHED, WHOLE),
    "a rank rotates its share of the rotated part": (REACHED, WHOLE),
    "rotary positions continue over the replicas' samples": (REACHED, WHOLE),
    "a rank has the sinks of another rank's heads": (ATTEND, WHOLE),
    "ranks of a shared group take queries for gates": (
        r"output( \d)? of layers\.0\.attention\.queries_keys_values", WHOLE),
    "a rank has the decays of another rank's heads (A_log)": (
        r"layers\.0\.gated_delta_net\.(recur|norm)", WHOLE),
    "a rank has the steps of another rank's heads (dt_bias)": (
        r"^gradient of layers\.\d\.gated_delta_net\.dt_bias", WHOLE),
    "gradients of a recurrence's norm are not summed": (
        r"^gradient of layers\.\d\.gated_delta_net\.norm\.weight", MISSING_TP),
    "states of later stages go on after a document's end": (
        r"layers\.2\.gated_delta_net\.(recur|norm)", WHOLE),
    "convolutions of later stages see the document before": (
        r"output( \d)? of layers\.2\.gated_delta_net\.convolution", WHOLE),
    "slices recur with the convolution of the first heads": (
        r"output( \d)? of layers\.0\.gated_delta_net\.convolution", WHOLE),
    "tokens of zigzag slices recur in the order of the ranks": (
        r"layers\.0\.gated_delta_net\.(project_in|recur|convolution)", WHOLE),
    "the z-loss is of the sums of a rank's logits": (r"losses_of|z_loss", WHOLE),
    "factors of queries continue over the replicas' samples": (
        r"input \d of layers\.0 ", WHOLE),
    "sinks have the gradient of the first replica's samples": (
        r"^gradient of layers\.\d\.attention\.sinks", WHOLE),
    "the gradient of sinks is a mean over the microbatch's samples": (
        r"^gradient of layers\.\d\.attention\.sinks", WHOLE),
    "the gradient of the shared part of keys is that of the rank's heads": (
        r"gradient of .*layers\.3\.attention\.(key_value_down|queries_keys_values)", WHOLE),
    "a rank's tokens have the shared part of keys of another rank's": (
        r"layers\.0\.attention\.(from_latents|queries_keys_values)", WHOLE),
    "gradients of latents' projections are not summed": (
        r"^gradient of layers\.\d\.attention\.(query|key_value)_down", MISSING_TP),
    "each rank's heads have the values of other heads": (
        r"input 3 of layers\.0\.attention\.reach_keys", WHOLE),
    "tokens of each expert are those of the replica": (r"layers\.\d\.mlp\.router\.expert_bias", WHOLE),
    "a recomputed layer gives no gradient to keys and values that it shares": (
        r"gradient of .*layers\.2\.attention\.(attend|queries_keys_values|value_norm)", WHOLE),
    "ranks after the first rotate layers without a window by the windows' base": (
        r"put of layers\.1\.attention\.(attend|reach_keys)", WHOLE),
    "ranks after the first use keys as values after their norm": (
        r"put of layers\.1\.attention\.value_norm", WHOLE),
    "gradients of the factors of layers' outputs are not summed": (
        r"^gradient of layers\.\d\.output_scale\.weight", WHOLE),  # of one element, every part is a multiple
    "an output's norm is that of a part of the sum": (PROJECTION, MISSING_TP),
    "gradients of an output's norm are not summed": (r"^gradient of .*norm\.weight", MISSING_TP),
    "of parallel blocks, attention alone sums its input gradient": (
        r"gradient of the (output of layers\.3\.mlp_norm|input of layers\.3\.mlp)", MISSING_TP),
    "parallel blocks add their input once on each rank": (r"output of layers\.0 ", WHOLE),
    "stages between the first and the last have norms after the residual connections": (
        r"put of layers\.1\.attention_norm", WHOLE),
    "the last stage's gradient of the word embedding is dropped": (
        r"gradient of embedding\.word\.weight", "(send|receive|sum) over pp"),
    "later tokens are counted on the rank": ("number of later-1 tokens that divides", WHOLE),
    "the loss of a later token is a mean over the microbatch's samples": ("^mtp_1_loss", WHOLE),
    "later tokens end with the rank's slice": (r"later_(tokens|labels|mask) of the microbatch", WHOLE),
    "the gradient of the weight that joins two states is not summed": (
        r"^gradient of mtp\.\d\.projection\.weight", MISSING_TP),
    "saved slices of a layer's input are gathered in another order": (
        r"input of layers\.\d \(recomputed", "all-gather over tp"),
    "saved slices are gathered over the replicas": (
        r"input of layers\.\d \(recomputed", "all-gather over dp"),
    "every rank saves the first slice of a layer's input": (r"input of layers\.\d \(recomputed", WHOLE),
}  # fmt: skip
"""By error: a pattern of the tensor that the error changes first, and of the collective or the sum at fault.

They follow from what an error does, not from the reports: write them before you run a bisection.
"""


@dataclass(frozen=True)
class Located:
    """The report of a bisection of an error.

    Attributes:
        location: None if the run ends with an exception, which `text` then is.
    """

    error: InjectedError
    location: Location | None
    text: str

    @property
    def what(self) -> str:
        """Return the tensor that is named; empty if none is."""
        found = self.location and self.location.difference
        return found.what if found else ""

    @property
    def details(self) -> list[str]:
        """Return the lines about what is remarkable, and about the last collective."""
        found = self.location and self.location.difference
        remarks = found.details[1:] if found else []
        return [each for each in remarks if not re.match(r"also on|\d+ of \d+ tensors", each)]

    @property
    def names_module(self) -> bool:
        """Return whether the report names the tensor that the error changes first."""
        return bool(self.what and re.search(PLACES[self.error.name][0], self.what))

    @property
    def names_operation(self) -> bool:
        """Return whether the report also names the collective at fault, or the sum that is missing."""
        lines = "\n".join(self.details)
        return self.names_module and bool(re.search(PLACES[self.error.name][1], lines))


def trace_with_error(
    topology: Topology,
    config: Config,
    iteration: int,
    generator_seed: int,
    providers: Providers | None,
    name: str,
) -> RankTrace:
    """Trace an iteration on this rank with an error injected."""
    with BY_NAME[name].injected(topology):
        return trace_rank(topology, config, iteration, generator_seed, providers)


def _trace_run(name: str, config: Config, world_size: int, *arguments: Any) -> list[RankTrace]:
    return run_ranks(
        trace_with_error, config.parallel.mesh, world_size, config, *arguments, name, timeout=60.0
    )


def locate(errors: Sequence[InjectedError]) -> Iterator[Located]:
    """Bisect each error in the layout in which it acts."""
    for error in errors:
        layout = Layout.parse(error.layout)
        config, alone = (each.apply(config_of(error.model), GLOBAL_BATCH_SIZE) for each in (layout, Layout()))
        trace = partial(_trace_run, error.name)
        try:
            location = locate_difference(
                config, alone, layout.world_size, NUM_ITERATIONS, PROVIDERS.get(error.model), trace
            )
        except (RankError, UserError) as failure:
            yield Located(error, None, str(failure).strip().splitlines()[-1])
        else:
            yield Located(error, location, location.text)


def table_of_places(found: Sequence[Located]) -> str:
    """Return the counts and the table of reports as Markdown."""
    rated = [each for each in found if each.error.name in PLACES]
    num_failed = sum(each.location is None for each in found)
    num_unrated = len(found) - len(rated) - num_failed
    in_collectives = [each for each in rated if PLACES[each.error.name][1] != WHOLE]
    lines = [
        f"{len(rated)} errors are rated. The report names the right tensor for "
        f"{sum(each.names_module for each in rated)} of them, and also the right operation for "
        f"{sum(each.names_operation for each in rated)}. {len(in_collectives)} of the errors are in a "
        f"collective, and the report names it for {sum(each.names_operation for each in in_collectives)}. "
        f"{num_failed} more end a run with an exception, and {num_unrated} are not rated.",
        "",
        "| error | layout | first difference | in the report | tensor | operation |",
        "|---|---|---|---|---|---|",
    ]
    for each in found:
        is_rated = each.error.name in PLACES
        verdicts = [
            ("right" if right else "wrong") if is_rated else "-"
            for right in (is_rated and each.names_module, is_rated and each.names_operation)
        ]
        cells = (each.error.name, each.error.layout, each.what or each.text, "; ".join(each.details))
        lines.append(f"| {' | '.join((*cells, *verdicts))} |")
    return "\n".join(lines)


PAGE = INJECTED_ERRORS.with_name("located_errors.md")
BEGIN, END = "<!-- begin: located errors -->", "<!-- end: located errors -->"


def write_places() -> None:
    """Bisect all errors that a verification finds, and replace the table of the page.

    A layout that assigns documents has no first difference: see `trace_run`.
    """
    errors = [error for error in CATALOGUE if not error.unseen and not error.is_of_saves]
    errors = [error for error in errors if "dynamic" not in error.layout]
    write_page(table_of_places([*locate(errors)]), PAGE, BEGIN, END)


if __name__ == "__main__":
    with RANKS:
        write_places()
