"""What no rule finds: attributes, parts and inputs of single models, each with its reason."""

from __future__ import annotations

from typing import Any

from benchmarks import zoo_inputs as given

ROPE = {"rope_type": "default", "rope_theta": 1e4}
SECTIONS = {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}, "rope_scaling": ROPE | {"mrope_section": [4, 2, 2]}}
HALF = {
    "rope_parameters": ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    "rope_scaling": ROPE | {"mrope_section": [2, 1, 1]},
}
NO_ROUTER_LOSS = {"output_router_logits": False}

# By the name of a configuration's class: what replaces the rules' values, or is added.
ATTRIBUTES: dict[str, dict[str, Any]] = {
    # heads x head_dim = expand x hidden of Mamba
    "Mamba2Config": {"num_heads": 8},
    "FalconH1Config": {"mamba_d_ssm": None, "mamba_d_head": 16},
    # one layer with attention among those without
    "BambaConfig": {"attn_layer_indices": [1]},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"], **NO_ROUTER_LOSS},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "NemotronHConfig": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "ZambaConfig": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    # sections of multimodal rotary embeddings stand in the code, for the full head_dim
    **{name: SECTIONS for name in ("Qwen2VLTextConfig", "Qwen2_5_VLTextConfig", "Glm4vTextConfig", "GlmOcrTextConfig",
                                   "GlmImageTextConfig", "PaddleOCRTextConfig", "HunYuanVLTextConfig")},
    "Glm4vMoeTextConfig": HALF,
    "Cosmos3EdgeTextConfig": SECTIONS,
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": ROPE}, "logit_scale": 0.7},
    # numbers of experts that are None and not worked out
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "Dots1Config": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "NllbMoeConfig": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    # transformers itself raises at a router loss here
    "DogeConfig": NO_ROUTER_LOSS,
    "GraniteMoeConfig": NO_ROUTER_LOSS, "GraniteMoeSharedConfig": NO_ROUTER_LOSS, "GraniteMoeSWAConfig": NO_ROUTER_LOSS,
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "Qwen4ExpTextConfig": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
                           "indexer_compress_ratio": 2},
    "Step3p7TextConfig": {"sliding_window": 8},
    "XmodConfig": {"default_language": "en_XX"},
    "xLSTMConfig": {"num_heads": 2, "qk_dim_factor": 1.0, "mode": "train", "return_last_states": False},
    "ReformerConfig": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4},
    "EsmConfig": {"vocab_size": 101, "pad_token_id": 1, "mask_token_id": 3},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 4, "vision_end_token_id": 5},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 4, "vision_end_token_id": 5},
    "Qwen2_5OmniTextConfig": SECTIONS,
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 64},
    "BltConfig": {"num_hidden_layers": 2},
    "DbrxAttentionConfig": {"rope_theta": 1e4},
    # images: their tokens have to be in the text, as many as queries
    **{name: {"num_query_tokens": 2, "image_token_index": 99} for name in ("Blip2Config", "InstructBlipConfig")},
    "InstructBlipVideoConfig": {"num_query_tokens": 2, "video_token_index": 99},
    "Kosmos2Config": {"latent_query_num": 2},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 99, "IMGIMGAZ": 61, "IMGIMGBZ": 62, "IMGIMGCZ": 63}},
    "Emu3Config": {"vocabulary_map": {"<image>": 99, "<|extra_200|>": 98, "<|visual token 000000|>": 61}},
    "JanusVQVAEConfig": {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 32, "num_embeddings": 32},
    "PPFormulaNetVisionConfig": {"output_channels": 64, "post_conv_in_channels": 64, "decoder_hidden_size": 64},
    "MimiConfig": {"upsample_groups": 64},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "VibeVoiceAsrConfig": {"acoustic_tokenizer_chunk_size": 3200},
    "InklingVisionConfig": {"num_hidden_layers": 8},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
}  # fmt: skip

# By the name of a model's class: what it takes beside text or instead of it.
INPUTS: dict[str, Any] = {
    "BlipForConditionalGeneration": given.pixels,
    "Blip2ForConditionalGeneration": given.image_tokens,
    "GitForCausalLM": given.pixels,
    "IdeficsForVisionText2Text": given.frames,
    "Kosmos2ForConditionalGeneration": given.kosmos,
    "InstructBlipForConditionalGeneration": given.image_tokens,
    "InstructBlipVideoForConditionalGeneration": given.image_tokens,
    "PPFormulaNetForConditionalGeneration": given.pixels,
    "BridgeTowerForMaskedLM": given.pixels,
    "ViltForMaskedLM": given.pixels,
    "VisionEncoderDecoderModel": given.pixels,
    "UdopForConditionalGeneration": given.boxes,
    "Pix2StructForConditionalGeneration": given.patches,
    "WhisperForConditionalGeneration": given.spectrogram,
    "VoxtralRealtimeForConditionalGeneration": given.spectrogram,
    "Speech2TextForConditionalGeneration": given.features,
    "CanaryForConditionalGeneration": given.features,
    "CohereAsrForConditionalGeneration": given.features,
    "SeamlessM4TForSpeechToText": given.features,
    "SeamlessM4Tv2ForSpeechToText": given.features,
    "SpeechEncoderDecoderModel": given.samples,
    "SpeechT5ForSpeechToText": given.samples,
    "MoonshineForConditionalGeneration": given.samples,
    "MoonshineStreamingForConditionalGeneration": given.samples,
    "SeamlessM4TTextToUnitForConditionalGeneration": given.embeddings,
    "SeamlessM4Tv2TextToUnitForConditionalGeneration": given.embeddings,
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": given.embeddings,
    "MusicgenForCausalLM": given.codebooks,
    "MusicgenMelodyForCausalLM": given.codebooks,
    "MusicgenForConditionalGeneration": given.decoded_codebooks,
    "MusicgenMelodyForConditionalGeneration": given.decoded_codebooks,
    "DiaForConditionalGeneration": given.channels,
    "CsmForConditionalGeneration": given.csm,
    "KyutaiSpeechToTextForConditionalGeneration": given.kyutai,
}
