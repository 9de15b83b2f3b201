# Made by `python -m cudnn_jax.graph.stubs` from the operation tables; not edited by hand.
from collections.abc import Sequence
from typing import Any

from cudnn_jax.graph.tensor import Tensor

class Methods:
    def abs(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def add(self, a: Tensor, b: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def add_square(self, a: Tensor, b: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def bias(self, input: Tensor, bias: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def binary_select(
        self,
        input0: Tensor,
        input1: Tensor,
        mask: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def ceil(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def cmp_eq(
        self,
        input: Tensor,
        comparison: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def cmp_ge(
        self,
        input: Tensor,
        comparison: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def cmp_gt(
        self,
        input: Tensor,
        comparison: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def cmp_le(
        self,
        input: Tensor,
        comparison: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def cmp_lt(
        self,
        input: Tensor,
        comparison: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def cmp_neq(
        self,
        input: Tensor,
        comparison: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def cos(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def div(self, a: Tensor, b: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def elu(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def elu_backward(
        self,
        loss: Tensor,
        input: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def erf(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def exp(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def floor(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def gelu(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def gelu_approx_tanh(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def gelu_approx_tanh_backward(
        self,
        loss: Tensor,
        input: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def gelu_backward(
        self,
        loss: Tensor,
        input: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def identity(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def log(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def logical_and(self, a: Tensor, b: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def logical_not(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def logical_or(self, a: Tensor, b: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def max(
        self,
        input0: Tensor,
        input1: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def min(
        self,
        input0: Tensor,
        input1: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def mod(
        self,
        input0: Tensor,
        input1: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def mul(self, a: Tensor, b: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def neg(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def pow(
        self,
        input0: Tensor,
        input1: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def reciprocal(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def rsqrt(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def scale(
        self,
        input: Tensor,
        scale: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def sigmoid(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def sigmoid_backward(
        self,
        loss: Tensor,
        input: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def sin(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def softplus(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def softplus_backward(
        self,
        loss: Tensor,
        input: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def sqrt(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def sub(self, a: Tensor, b: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def tan(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def tanh(self, input: Tensor, compute_data_type: Any = None, name: str = "") -> Tensor: ...
    def tanh_backward(
        self,
        loss: Tensor,
        input: Tensor,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def relu(
        self,
        input: Tensor,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def leaky_relu(
        self,
        input: Tensor,
        negative_slope: float,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def swish(
        self,
        input: Tensor,
        swish_beta: float | None = None,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def gen_index(
        self,
        input: Tensor,
        axis: int,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def relu_backward(
        self,
        loss: Tensor,
        input: Tensor,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def leaky_relu_backward(
        self,
        loss: Tensor,
        input: Tensor,
        negative_slope: float,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def swish_backward(
        self,
        loss: Tensor,
        input: Tensor,
        swish_beta: float | None = None,
        compute_data_type: Any = None,
        name: str = "",
    ) -> Tensor: ...
    def rmsnorm(
        self,
        input: Tensor,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        epsilon: Tensor | float | None = None,
        norm_forward_phase: str | None = None,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, Tensor | None]: ...
    def rmsnorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor | None = None,
        inv_variance: Tensor | None = None,
        has_dbias: bool = True,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...
    def gdn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor,
        initial_state: Tensor | None = None,
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        state_indices: Tensor | None = None,
        scale: float | None = None,
        output_final_state: bool = False,
        use_qk_l2norm: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "LOG",
        batch_invariant: bool = False,
        overwrite_initial_state: bool = False,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...
    def gdn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor,
        dO: Tensor,
        state_checkpoints: Tensor | None = None,
        initial_state: Tensor | None = None,
        d_final_state: Tensor | None = None,
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        scale: float | None = None,
        use_qk_l2norm: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "LOG",
        batch_invariant: bool = False,
        overwrite_initial_state: bool = False,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]: ...
    def kda(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor,
        initial_state: Tensor | None = None,
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        state_indices: Tensor | None = None,
        scale: float | None = None,
        output_final_state: bool = False,
        use_qk_l2norm: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "LOG",
        gate_lower_bound: float = -5.0,
        batch_invariant: bool = False,
        overwrite_initial_state: bool = False,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...
    def kda_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor,
        dO: Tensor,
        state_checkpoints: Tensor | None = None,
        initial_state: Tensor | None = None,
        d_final_state: Tensor | None = None,
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        scale: float | None = None,
        use_qk_l2norm: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "LOG",
        gate_lower_bound: float = -5.0,
        batch_invariant: bool = False,
        overwrite_initial_state: bool = False,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]: ...
    def gdn2(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        w: Tensor,
        cu_seqlens: Tensor,
        initial_state: Tensor | None = None,
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        state_indices: Tensor | None = None,
        scale: float | None = None,
        output_final_state: bool = False,
        use_qk_l2norm: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        beta_guard: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "LOG",
        gate_lower_bound: float = -5.0,
        batch_invariant: bool = False,
        overwrite_initial_state: bool = False,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...
    def gdn2_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        w: Tensor,
        cu_seqlens: Tensor,
        dO: Tensor,
        state_checkpoints: Tensor | None = None,
        initial_state: Tensor | None = None,
        d_final_state: Tensor | None = None,
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        scale: float | None = None,
        use_qk_l2norm: bool = False,
        checkpoint_every_n_tokens: int = 0,
        use_beta_sigmoid: bool = False,
        allow_neg_eigval: bool = False,
        beta_guard: bool = False,
        safe_gate: bool = False,
        gate_domain: str = "LOG",
        gate_lower_bound: float = -5.0,
        batch_invariant: bool = False,
        overwrite_initial_state: bool = False,
        compute_data_type: Any = None,
        name: str = "",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]: ...
    def sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_inference: bool | None = None,
        attn_scale: Tensor | float | None = None,
        bias: Tensor | None = None,
        block_mask: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: str = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Sequence[Any] | None = None,
        rng_dump: Tensor | None = None,
        paged_attention_k_table: Tensor | None = None,
        paged_attention_v_table: Tensor | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        compute_data_type: Any = None,
        name: str = "",
        score_mod: Any | None = None,
        generate_stats: bool | None = None,
        implementation: str | None = None,
        score_max: Tensor | None = None,
        score_sum_exp: Tensor | None = None,
        sink_token: Tensor | None = None,
        unfuse_fma: bool = False,
        cu_seq_len_q: Tensor | None = None,
        cu_seq_len_kv: Tensor | None = None,
        stats_use_log2: bool = False,
        *,
        kv_mask: Tensor | None = None,
        softmax_precision: str | None = None,
        attn_scale_prefolded: bool = False,
    ) -> tuple[Tensor, Tensor | None]: ...
    def sdpa_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        dO: Tensor,
        stats: Tensor,
        attn_scale: Tensor | float | None = None,
        bias: Tensor | None = None,
        dBias: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: str = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Sequence[Any] | None = None,
        rng_dump: Tensor | None = None,
        use_deterministic_algorithm: bool = False,
        compute_data_type: Any = None,
        name: str = "",
        score_mod: Any | None = None,
        score_mod_bprop: Any | None = None,
        sink_token: Tensor | None = None,
        dSink_token: Tensor | None = None,
        *,
        dStats: Tensor | None = None,
        softmax_precision: str | None = None,
        attn_scale_prefolded: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]: ...
