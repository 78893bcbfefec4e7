// Streamed tool calls as clients in JavaScript join them; see streamed_calls.py, whose forms and rules these are.
//
//     npm install openai @anthropic-ai/sdk ai @ai-sdk/openai @ai-sdk/anthropic zod
//     node streamed_calls.mjs URL [RUNS] [parallel]

import { readFileSync } from 'node:fs'
import { isDeepStrictEqual } from 'node:util'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import Anthropic from '@anthropic-ai/sdk'
import { generateText, streamText, tool } from 'ai'
import OpenAI from 'openai'
import { z } from 'zod'

const [url, runs = '10', parallel] = process.argv.slice(2)
const base = `${url}/v1`
const model = (await (await fetch(`${base}/models`)).json()).data[0].id
const several = parallel === 'parallel'
const limit = 200

const fields = z.object({
  place: z.enum(['Bern', 'Basel', 'Chur']),
  days: z.number().int().min(1).max(14),
  note: z.string().regex(/^[a-z "]{0,12}$/),
})
const parameters = z.toJSONSchema(fields)
const named = { name: 'weather', description: 'Look up the weather.', parameters }
const question = (run) => `Rain in ${['Bern', 'Basel', 'Chur'][run % 3]} in the next ${(run % 14) + 1} days?`

const client = new OpenAI({ baseURL: base, apiKey: 'none', maxRetries: 0 })
const claude = new Anthropic({ baseURL: url, apiKey: 'none', maxRetries: 0 })

const forms = {
  openai: {
    'chat.completions.stream': async (run, stream) => {
      const asked = {
        model,
        messages: [{ role: 'user', content: question(run) }],
        tools: [{ type: 'function', function: named }],
        tool_choice: 'required',
        parallel_tool_calls: several,
        max_tokens: limit,
        temperature: 1,
        seed: run,
      }
      const reply = stream
        ? await client.chat.completions.stream(asked).finalChatCompletion()
        : await client.chat.completions.create(asked)
      const message = reply.choices[0].message
      const calls = message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)])
      return [message.content ?? '', calls]
    },
    'responses.stream': async (run, stream) => {
      const asked = {
        model,
        input: question(run),
        tools: [{ type: 'function', strict: false, ...named }],
        tool_choice: 'required',
        parallel_tool_calls: several,
        max_output_tokens: limit,
        temperature: 0,
      }
      const reply = stream
        ? await client.responses.stream(asked).finalResponse()
        : await client.responses.create(asked)
      const items = reply.output.filter((item) => item.type === 'function_call')
      return [reply.output_text, items.map((item) => [item.name, JSON.parse(item.arguments)])]
    },
  },
  '@anthropic-ai/sdk': {
    'messages.stream': async (run, stream) => {
      const asked = {
        model,
        messages: [{ role: 'user', content: question(run) }],
        tools: [{ name: 'weather', input_schema: parameters }],
        tool_choice: { type: 'any', disable_parallel_tool_use: !several },
        max_tokens: limit,
        temperature: 0,
      }
      const reply = stream ? await claude.messages.stream(asked).finalMessage() : await claude.messages.create(asked)
      const text = reply.content.map((block) => (block.type === 'text' ? block.text : '')).join('')
      const uses = reply.content.filter((block) => block.type === 'tool_use')
      return [text, uses.map((block) => [block.name, block.input])]
    },
  },
  '@ai-sdk/openai': {
    'streamText, chats': sdk(createOpenAI({ baseURL: base, apiKey: 'none' }).chat(model), 'openai', 1),
    'streamText, Responses': sdk(createOpenAI({ baseURL: base, apiKey: 'none' })(model), 'openai', 0),
  },
  '@ai-sdk/anthropic': {
    'streamText': sdk(createAnthropic({ baseURL: base, apiKey: 'none' })(model), 'anthropic', 0),
  },
}

function sdk(chosen, provider, temperature) {
  return async (run, stream) => {
    const asked = {
      model: chosen,
      prompt: question(run),
      tools: { weather: tool({ description: named.description, inputSchema: fields }) },
      toolChoice: 'required',
      maxOutputTokens: limit,
      maxRetries: 0,
      temperature,
      ...(temperature ? { seed: run } : {}),
      providerOptions: { [provider]: { parallelToolCalls: several, disableParallelToolUse: !several } },
    }
    let reply
    if (stream) {
      reply = streamText({ ...asked, onError: () => {} })
      for await (const part of reply.fullStream) if (part.type === 'error') throw part.error
    } else reply = await generateText(asked)
    const calls = await reply.toolCalls
    return [await reply.text, calls.map((call) => [call.toolName, call.input])]
  }
}

function version(name) {
  return JSON.parse(readFileSync(new URL(`./node_modules/${name}/package.json`, import.meta.url))).version
}

let broken = 0
let total = 0
for (const [name, cases] of Object.entries(forms)) {
  for (const [form, ask] of Object.entries(cases)) {
    const faults = []
    for (let run = 0; run < Number(runs); run++) {
      try {
        const [whole, streamed] = [await ask(run, false), await ask(run, true)]
        if (!whole[1].length || (whole[1].length > 1 && !several)) faults.push(`calls: ${JSON.stringify(whole)}`)
        else if (!isDeepStrictEqual(whole, streamed)) faults.push(`${JSON.stringify(streamed)}, whole ${JSON.stringify(whole)}`)
      } catch (error) {
        faults.push(String(error))
      }
    }
    console.log(`${name} ${version(name)} | ${form} | ${faults.length} of ${runs} broken`)
    if (faults.length) console.log(`    ${faults[0].slice(0, 400)}`)
    broken += faults.length
    total += Number(runs)
  }
}
console.log(`${broken} broken runs of ${total}`)
process.exit(broken > 0 ? 1 : 0)
