"""Chat templates of several styles, each with and without generation tags."""


def tagged(template):
    return template.replace("<<", "{% generation %}").replace(">>", "{% endgeneration %}")


def untagged(template):
    return template.replace("<<", "").replace(">>", "")


# A default system message, a header and a line end for each turn.
CHATML = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' %}<<{{- m.content }}"
    "{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>' }}>>"
    "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Begin token once, headers between tokens, contents trimmed.
LLAMA3 = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{%- if m.role == 'assistant' %}<<{{- m.content | trim + '<|eot_id|>' }}>>"
    "{%- else %}{{- m.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
# No header for the assistant, strict order, the end token after each answer.
MISTRAL = (
    "{{- bos_token }}{%- for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}"
    "{%- else %}<<{{- ' ' + m.content + eos_token }}>>{%- endif %}{%- endfor %}"
)
# Ignores add_generation_prompt: the assistant header is not learned.
UNASKED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
)
# Writes the number of turns first: every turn changes the text before it.
COUNTING = (
    "{{- messages | length }}{%- for m in messages %}{{- '<|im_start|>' + m.role + ':' + m.content + '<|im_end|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant:' }}{%- endif %}"
)
