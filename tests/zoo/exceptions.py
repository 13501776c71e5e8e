"""What no rule finds: attributes, parts and inputs of single models, each with its reason."""

from typing import Any

from . import inputs as given

ROPE = {"rope_type": "default", "rope_theta": 1e4}


def sections(*sizes: int, **others: Any) -> dict[str, Any]:
    """Rotary embeddings of time, height and width: half of a head, whose sections the code has for the full size."""
    made = ROPE | others | {"mrope_section": list(sizes)}
    return {"rope_parameters": made, "rope_scaling": made}  # transformers 5 and 4


MULTIMODAL = (
    "Qwen2VLTextConfig", "Qwen2_5_VLTextConfig", "Qwen3VLTextConfig", "Qwen3VLMoeTextConfig", "Qwen2_5OmniTextConfig",
    "Qwen3OmniMoeTextConfig", "Glm4vTextConfig", "GlmOcrTextConfig", "GlmImageTextConfig", "PaddleOCRTextConfig",
    "HunYuanVLTextConfig", "Cosmos3EdgeTextConfig",
)  # fmt: skip
NO_ROUTER_LOSS = {"output_router_logits": False}

# By the name of a configuration's class: what replaces the rules' values, or is added.
ATTRIBUTES: dict[str, dict[str, Any]] = {
    # heads x head_dim = expand x hidden of Mamba
    "Mamba2Config": {"num_heads": 8},
    "FalconH1Config": {"mamba_d_ssm": None, "mamba_d_head": 16},
    # one layer with attention among those without
    "BambaConfig": {"attn_layer_indices": [1]},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"], **NO_ROUTER_LOSS},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "NemotronHConfig": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "ZambaConfig": {"use_mamba_kernels": False, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    **dict.fromkeys(MULTIMODAL, sections(4, 2, 2)),
    "Glm4vMoeTextConfig": sections(2, 1, 1, partial_rotary_factor=0.5),
    "Ernie4_5_VLMoeTextConfig": sections(3, 3, 2), "Ernie4_5_VL_MoeTextConfig": sections(3, 3, 2),
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": sections(4, 2, 2)["rope_parameters"]}},
    # numbers of experts that are None and not worked out
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "Dots1Config": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "NllbMoeConfig": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    # transformers itself raises at a router loss here
    "DogeConfig": NO_ROUTER_LOSS, "DbrxConfig": NO_ROUTER_LOSS,
    "GraniteMoeConfig": NO_ROUTER_LOSS, "GraniteMoeSharedConfig": NO_ROUTER_LOSS, "GraniteMoeSWAConfig": NO_ROUTER_LOSS,
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "DeepseekOcr2TextConfig": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "Qwen4ExpTextConfig": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
                           "indexer_compress_ratio": 2},
    "Step3p7TextConfig": {"sliding_window": 8},
    "XmodConfig": {"default_language": "en_XX"},
    "xLSTMConfig": {"num_heads": 2, "qk_dim_factor": 1.0, "mode": "train"},
    "ReformerConfig": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4},
    "EsmConfig": {"vocab_size": 101, "pad_token_id": 1, "mask_token_id": 3},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 4, "vision_end_token_id": 5},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 4, "vision_end_token_id": 5},
    "Dots3NoteTextConfig": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16,
                            "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8,
                            "swa_v_head_dim": 16},
    "FlintConfig": {"mlp_only_layers": []},
    "MuseSparkAudioConfig": {"num_hidden_layers": 4},
    "RadioConfig": {"video_temporal_patch_size": 2},
    "Molmo2AdapterConfig": {"vision_feature_layer": [-1, -2]},
    "MllamaTextConfig": {"rope_scaling": ROPE, "rope_parameters": ROPE},
    "Qwen3OmniMoeTalkerTextConfig": {**sections(4, 2, 2), "shared_expert_intermediate_size": 64},
    "BltConfig": {"num_hidden_layers": 2},
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2, "vocab_size": 101},
    # images: their tokens have to be in the text, as many as queries
    **{name: {"num_query_tokens": 2, "image_token_index": 99} for name in ("Blip2Config", "InstructBlipConfig")},
    "InstructBlipVideoConfig": {"num_query_tokens": 2, "video_token_index": 99},
    "Kosmos2Config": {"latent_query_num": 2},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 99, "IMGIMGAZ": 61, "IMGIMGBZ": 62, "IMGIMGCZ": 63}},
    "Emu3Config": {"vocabulary_map": {"<image>": 99, "<|extra_200|>": 98, "<|visual token 000000|>": 61}},
    **{name: {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 32, "num_embeddings": 32}
       for name in ("JanusVQVAEConfig", "Emu3VQVAEConfig", "ChameleonVQVAEConfig")},
    "PPFormulaNetVisionConfig": {"output_channels": 64, "post_conv_in_channels": 64, "decoder_hidden_size": 64},
    "MimiConfig": {"upsample_groups": 64},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "VibeVoiceAsrConfig": {"acoustic_tokenizer_chunk_size": 3200},
    "InklingVisionConfig": {"num_hidden_layers": 4, "patch_size": 4, "temporal_patch_size": 2},
    "TimmWrapperConfig": {"model_args": {"embed_dim": 64}, "hidden_size": 64},
    "Granite4VisionConfig": {"downsample_rate": "1/2", "deepstack_layer_map": [[-2, 0]], "spatial_target_layers": [1]},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
}  # fmt: skip

# Classes whose labels are no tokens: what they are instead.
NO_TOKENS = {
    "PocketTTSForConditionalGeneration": "its labels are latents of sound, not tokens",
    "GradiumPhononTTSForConditionalGeneration": "its labels are latents of sound, not tokens",
}

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
    "Molmo2ForConditionalGeneration": given.token_types,
    "UdopForConditionalGeneration": given.boxes,
    "Pix2StructForConditionalGeneration": given.patches,
    "WhisperForConditionalGeneration": given.spectrogram,
    "VoxtralRealtimeForConditionalGeneration": given.heard,
    "PerceiverForMaskedLM": given.all_positions,
    "Qwen3OmniMoeTalkerForConditionalGeneration": given.talker,
    "Speech2TextForConditionalGeneration": given.features,
    "CanaryForConditionalGeneration": given.features,
    "CohereAsrForConditionalGeneration": given.features,
    "SeamlessM4TForSpeechToText": given.features,
    "SeamlessM4Tv2ForSpeechToText": given.features,
    "SpeechEncoderDecoderModel": given.samples,
    "Wav2Vec2ForMaskedLM": given.samples,
    "SpeechT5ForSpeechToText": given.samples,
    "MoonshineForConditionalGeneration": given.samples,
    "MoonshineStreamingForConditionalGeneration": given.samples,
    "SeamlessM4TTextToUnitForConditionalGeneration": given.embeddings,
    "SeamlessM4Tv2TextToUnitForConditionalGeneration": given.characters,
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": given.embeddings,
    "MusicgenForCausalLM": given.codebooks,
    "MusicgenMelodyForCausalLM": given.codebooks,
    "MusicgenForConditionalGeneration": given.decoded_codebooks,
    "MusicgenMelodyForConditionalGeneration": given.decoded_codebooks,
    "DiaForConditionalGeneration": given.channels,
    "CsmForConditionalGeneration": given.csm,
    "KyutaiSpeechToTextForConditionalGeneration": given.kyutai,
}
